"""The snapshot that /pool shows: every page of the pool is told of, and who is parked (R35)."""

from __future__ import annotations

import asyncio

from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import Finished, Snapshot
from tests.engine.workload import GREEDY, four_chats


def check(snapshot: Snapshot) -> None:
    """What no slot holds and no cache knows is free, page by page."""
    assert len(snapshot.cache_map) == snapshot.num_pages
    held = {page for slot in snapshot.slots for page in slot.pages}
    cached = {page for page, is_known in enumerate(snapshot.cache_map) if is_known} - held
    assert len(cached) == snapshot.cached_pages
    assert len(held) == snapshot.held_pages + snapshot.transfer_pages
    assert len(held | cached) == snapshot.num_pages - snapshot.free_pages
    parked = [slot.id for slot in snapshot.slots if slot.state == "preempted"]
    assert sorted(snapshot.parked_slots) == parked
    assert not any(snapshot.slots[slot].pages for slot in snapshot.parked_slots)


def test_every_page_has_one_holder_or_is_free_while_chats_are_parked(tiny_model: Model) -> None:
    seen: list[Snapshot] = []

    async def scenario() -> None:
        handle = EngineHandle(build_engine(tiny_model, Settings(ctx_size=256, parallel=4), num_threads=1))
        await handle.start()

        async def client(number: int) -> None:
            async for event in handle.submit([four_chats(GREEDY)[number]], str(number)):
                if not isinstance(event, Finished):  # its pages may be on their way, and no slot shows them
                    seen.append(handle.snapshot)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(client(number))
        await handle.stop()

    asyncio.run(scenario())
    for snapshot in seen:
        check(snapshot)
    assert any(snapshot.parked_slots for snapshot in seen) and any(snapshot.cached_pages for snapshot in seen)
