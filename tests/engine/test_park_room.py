"""A park that is sent to memory finds room there, whatever is kept, shared or on its way (R22). Should there be less
than the planner was told, the next tier takes it, and that is no error (R23).
"""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import pytest
import torch

from pyserve.copies import Copy
from pyserve.engine import Engine
from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.park import Ending, Parking
from pyserve.sequence import Sequence, Tier
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import SamplingParams, SequenceRequest
from tests.engine.parked import (
    check_host_memory,
    content,
    finish,
    one,
    parking_of,
    restore,
    sequence_of,
    small_store,
)
from tests.engine.workload import alone, assert_clean, ignore_speed, request, run, settle

NUM_GROUPS = 30
NUM_CLIENTS = 8
CHAIN = ("a", "b", "c", "d", "e", "f")


def group_of(source: random.Random) -> list[SequenceRequest]:
    """One sequence or a few, with a beginning that others have as well, up to some page."""
    beginning = request(source.randrange(2), 100, 1).prompt[: source.randrange(4, 100)]
    prompt = (*beginning, *request(source.randrange(1000), source.randrange(1, 30), 1).prompt)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(source.choice([1, 1, 1, 2, 3]))]
    return [SequenceRequest(prompt, each, max_tokens=source.randrange(5, 60)) for each in params]


def little_memory(model: Model, source: random.Random, page_size: int, disk: str | None) -> Engine:
    ctx_size, preempt_every = source.choice([(176, 0), (256, 5), (400, 12), (1000, 5), (1000, 12)])
    settings = Settings(
        ctx_size=ctx_size,
        parallel=source.randrange(4, 7),
        page_size=page_size,
        batch_size=source.choice([16, 512]),
        preempt_every=preempt_every,
        preempt_async=source.choice([True, True, False]),
        preempt_disk=disk,
    )
    engine = build_engine(model, settings, num_threads=1)
    ignore_speed(engine)
    engine._parking.arena.budget_bytes = source.randrange(8, 61) * engine.info.page_bytes
    return engine


async def serve(engine: Engine, source: random.Random) -> None:
    """Some clients, one request after another each; every third leaves before its answer is complete."""
    handle = EngineHandle(engine)
    await handle.start()
    groups = [group_of(source) for _ in range(NUM_GROUPS)]

    async def client() -> None:
        while groups:
            generation = handle.submit(groups.pop(), "client")
            patience = source.choice([10**6, 10**6, source.randrange(1, 60)])
            while not generation.is_over and patience > 0:
                patience -= len(await generation.next_events())
            generation.cancel()
            check_host_memory(engine._parking)

    async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
        for _ in range(NUM_CLIENTS):
            clients.create_task(client())
    await settle(handle)
    await handle.stop()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_park_that_is_sent_to_memory_finds_room(
    tiny_model: Model,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    page_size: int,
    has_disk: bool,
    seed: int,
) -> None:
    caplog.set_level(logging.INFO)
    source = random.Random(seed)
    engine = little_memory(tiny_model, source, page_size, str(tmp_path) if has_disk else None)
    sent_elsewhere: list[Copy] = []
    engine._parking._park_elsewhere = sent_elsewhere.append  # type: ignore[method-assign]
    asyncio.run(serve(engine, source))
    assert not sent_elsewhere
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []
    assert engine.counters.preempts > 0


def kept_of(parking: Parking, sequence: Sequence, pages: list[int], num_common: int) -> None:
    """It was parked and is back. The first `num_common` of its pages are in a block."""
    parking.park(sequence, pages, chain=CHAIN[: len(pages)], num_common=num_common)
    assert one(parking).ending is Ending.DONE
    assert restore(parking, sequence, pages).ending is Ending.DONE


def pages_held(parking: Parking) -> int:
    return sum(slab.num_used for slab in parking.arena._slabs)


def test_who_uses_a_few_of_the_pages_that_another_keeps_takes_no_room_for_the_rest() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=10 * kv.page_bytes)
    first, second, third = sequence_of(24, id=1), sequence_of(12, id=2), sequence_of(24, id=3)
    kept_of(parking, first, [0, 1, 2, 3, 4, 5], num_common=6)
    assert parking.free_pages() == 10
    parking.park(second, [0, 1, 9], chain=CHAIN[:2])
    landed = one(parking)
    assert (landed.ending, landed.num_bytes) == (Ending.DONE, kv.page_bytes)
    assert parking.free_pages() == 10 - 3, "four pages of the block are only kept"
    wanted = content(kv, [0, 1, 9])
    parking.park(third, [20, 21, 22, 23, 24, 25])
    assert one(parking).ending is Ending.DONE
    assert pages_held(parking) == 3 + 6, "the four were given up, and the two that are in use were not"
    assert restore(parking, second, [28, 29, 30]).ending is Ending.DONE
    assert torch.equal(content(kv, [28, 29, 30]), wanted)
    finish(parking)


def test_what_is_kept_of_one_that_is_parked_next_is_given_up_last() -> None:
    """Else the first of two would take the pages that the second was said to have already."""
    kv = small_store()
    parking = Parking(kv, budget_bytes=8 * kv.page_bytes)
    first, second, third = sequence_of(16, id=1), sequence_of(16, id=2), sequence_of(16, id=3)
    for sequence, page in ((first, 0), (second, 4)):
        kept_of(parking, sequence, list(range(page, page + 4)), num_common=0)
    parking.expect([third, first])
    parking.park(third, [20, 21, 22, 23])
    parking.park(first, [0, 1, 2, 3])
    landed = parking.landed()
    while len(landed) < 2:
        landed += parking.landed()
    moved = {each.sequence: (each.ending, each.num_bytes // kv.page_bytes) for each in landed}
    assert moved == {third: (Ending.DONE, 4), first: (Ending.DONE, 0)}
    finish(parking)


def test_a_park_to_disk_takes_no_room_in_memory(tmp_path: Path) -> None:
    kv = small_store()
    parking = parking_of(kv, tmp_path, budget_bytes=10 * kv.page_bytes)
    first, second = sequence_of(24, id=1), sequence_of(32, id=2)
    kept_of(parking, first, [0, 1, 2, 3, 4, 5], num_common=6)
    wanted = content(kv, list(range(8)))
    parking.park(second, list(range(8)), Tier.DISK, chain=CHAIN[:6])
    assert one(parking).num_bytes == 8 * kv.page_bytes
    assert parking.free_pages() == 10
    assert restore(parking, second, list(range(20, 28))).ending is Ending.DONE
    assert torch.equal(content(kv, list(range(20, 28))), wanted)
    finish(parking)


@pytest.mark.parametrize("has_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("when", ["asked", "made"])
def test_memory_that_is_gone_by_then_is_no_error(
    tiny_model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_disk: bool, when: str
) -> None:
    """The machine had some when the park was planned, and has none when it is asked, or when it makes it."""
    caplog.set_level(logging.INFO)
    chats = [request(seed, 40, 60) for seed in range(3)]

    def none_left(num_bytes: int) -> torch.Tensor:
        raise MemoryError("the system has none")

    def prepare(engine: Engine) -> None:
        ignore_speed(engine)
        parking = engine._parking
        parking.prepare = lambda num_pages: None  # type: ignore[method-assign]
        if when == "made":
            parking.arena.allocate = none_left
        else:
            parking.free_pages = lambda: 1000  # type: ignore[method-assign]
            parking.arena.budget_bytes = 0

    result = run(
        tiny_model, [[chat] for chat in chats], prepare=prepare, ctx_size=512, parallel=3, page_size=4,
        preempt_every=9, preempt_disk=str(tmp_path) if has_disk else None, verify_parks="all",
    )  # fmt: skip
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    lines = [each for each in caplog.records if "no tier has room for it" in each.getMessage()]
    assert bool(lines) is not has_disk
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert result.counters.copies_failed == 0
    assert (result.counters.recomputes == 0) is has_disk
    assert (result.counters.restored_bytes > 0) is has_disk
    assert_clean(result)


def test_no_more_memory_is_made_ready_than_one_can_ever_hold(tiny_model: Model) -> None:
    """However large the pool is."""
    engines: list[Engine] = []
    sizes: list[int] = []

    def watch(engine: Engine) -> None:
        engines.append(engine)
        allocate = engine._parking.arena.allocate

        def noted(num_bytes: int) -> torch.Tensor:
            sizes.append(num_bytes)
            return allocate(num_bytes)

        engine._parking.arena.allocate = noted

    chats = [[request(seed, 20, 60)] for seed in range(2)]
    result = run(tiny_model, chats, prepare=watch, ctx_size=1 << 16, parallel=2, page_size=4, preempt_every=16)
    pool_bytes = engines[0]._parking.page_bytes * (1 << 14)
    assert result.preempts >= 6
    assert 0 < sum(sizes) <= 2 << 20 < pool_bytes // 4
    assert_clean(result)
