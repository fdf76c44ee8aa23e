"""Nothing outlives its sequence: clients leave at any moment, while copies, memory and disks take their time or fail.
Then every page is free or cached, no host memory and no file is held, and nothing waits (R12, R20, R22).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyserve.engine import Engine
from pyserve.generation import Generation
from pyserve.handle import EngineHandle
from pyserve.host_arena import allocate_slab
from pyserve.models.load import Model
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import SamplingParams, SequenceRequest
from tests.engine.faults import GatedStream
from tests.engine.parked import check_host_memory, check_nothing_is_held
from tests.engine.workload import request, settle

TICK_S = 0.001
ACTIONS = (
    "chat", "group", "tick", "tick", "tick", "leave", "leave_one", "let_through", "let_through", "let_through", "fail",
    "hold_memory", "give_memory", "let_all_through",
)  # fmt: skip


class Memory:
    """Makes slabs, but only while it is open; refuses one now and then."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_refusals = 0

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.gate.wait(20)
        if self.num_refusals:
            self.num_refusals -= 1
            raise MemoryError("the system has none")
        return allocate_slab(num_bytes)


class Crowd:
    """An engine whose copies and memory are held back, and clients who come and leave."""

    def __init__(self, engine: Engine, handle: EngineHandle) -> None:
        self.engine = engine
        self.handle = handle
        self.stream = GatedStream()
        self.memory = Memory()
        self.clients: list[Generation] = []
        self.num_requests = 0
        parking = engine._parking
        parking.tiers.stream.close()
        parking.tiers.stream = self.stream  # type: ignore[assignment]
        parking.arena.allocate = self.memory

    async def act(self, action: str, number: int) -> None:
        if action == "chat":
            self._submit([request(number % 5, 3 + number % 60, 5 + number % 70)])
        elif action == "group":
            prompt = request(number % 3, 20 + number % 30, 1).prompt
            params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(2 + number % 3)]
            self._submit([SequenceRequest(prompt, each, max_tokens=40) for each in params])
        elif action == "leave" and self.clients:
            self.clients.pop(number % len(self.clients)).cancel()
        elif action == "leave_one" and self.clients:
            self.clients[number % len(self.clients)].cancel(0)
        elif action == "let_through":
            self.stream.let_through()
        elif action == "fail":
            self.stream.let_through(is_good=False)
        elif action == "let_all_through":
            for _ in range(len(self.stream.held)):
                self.stream.let_through()
        elif action == "hold_memory":
            self.memory.gate.clear()
        elif action == "give_memory":
            self.memory.gate.set()
        await asyncio.sleep(TICK_S * (number % 3) if action == "tick" else 0)
        self.check()

    async def see_a_park(self) -> None:
        """On a busy machine the engine may not have come to one."""
        self.memory.gate.set()
        self._submit([request(1, 5, 100)])
        while not self.engine.counters.preempts:
            self.stream.let_through()
            await asyncio.sleep(TICK_S)

    def check(self) -> None:
        self.engine._ledger.check_integrity()
        check_host_memory(self.engine._parking)

    async def leave_all(self) -> None:
        """Every client hangs up; what was held back is let through afterwards, bit by bit."""
        for client in self.clients:
            client.cancel()
        for _ in range(3):
            await asyncio.sleep(TICK_S)
            self.stream.let_through()
        self.memory.gate.set()
        await asyncio.sleep(TICK_S)
        self.stream.open()

    async def check_nothing_is_left(self) -> None:
        parking, ledger = self.engine._parking, self.engine._ledger
        for _ in range(1000):
            if not parking.held_bytes and not parking.disk_bytes and ledger.is_idle:
                break
            await asyncio.sleep(0.005)
        self.check()
        check_nothing_is_held(parking)
        assert ledger.is_idle and not ledger.num_waiting and not self.handle.snapshot.is_stuck
        assert ledger.free_pages + ledger.cached_pages == ledger.limits.num_pages
        assert all(ledger.sequence_in_slot(slot) is None for slot in range(ledger.limits.num_slots))

    def _submit(self, group: list[SequenceRequest]) -> None:
        self.num_requests += 1
        self.clients.append(self.handle.submit(group, str(self.num_requests)))


@asynccontextmanager
async def crowd_of(
    model: Model,
    *,
    budget_pages: int = 1000,
    disk: str | None = None,
    deadline_s: float = 60.0,
    **options: object,
) -> AsyncIterator[Crowd]:
    chosen = {"ctx_size": 192, "parallel": 4, "page_size": 4, "verify_parks": "all", "preempt_disk": disk, **options}
    engine = build_engine(model, Settings(**chosen), num_threads=1)  # type: ignore[arg-type]
    engine._parking.arena.budget_bytes = budget_pages * engine.info.page_bytes
    engine._parking.deadline_s = deadline_s
    handle = EngineHandle(engine)
    crowd = Crowd(engine, handle)
    await handle.start()
    try:
        yield crowd
    finally:
        crowd.memory.gate.set()
        crowd.stream.open()
        await handle.stop()


async def play(model: Model, script: list[tuple[str, int]], **options: object) -> int:
    """The script, then everybody leaves. Returns how many parks there were."""
    async with asyncio.timeout(60), crowd_of(model, **options) as crowd:  # type: ignore[arg-type]
        for action, number in script:
            await crowd.act(action, number)
        if options.get("preempt_every"):
            await crowd.see_a_park()
        await crowd.leave_all()
        await crowd.check_nothing_is_left()
        return crowd.engine.counters.preempts


def random_script(source: random.Random, length: int) -> list[tuple[str, int]]:
    return [(source.choice(ACTIONS), source.randrange(1000)) for _ in range(length)]


@pytest.mark.parametrize("seed", range(6))
def test_clients_that_leave_beside_slow_copies_and_slow_memory_leave_nothing(
    tiny_model: Model, tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    options = {
        "budget_pages": source.choice([6, 30, 1000]),
        "disk": source.choice([None, str(tmp_path)]),
        "deadline_s": source.choice([0.004, 60.0, 60.0]),
        "preempt_every": source.choice([0, 3, 7]),
        "preempt_async": source.choice([True, True, True, False]),
        "preempt_planner": source.choice([True, True, False]),
        "page_size": source.choice([1, 4, 16]),
    }
    num_parks = asyncio.run(play(tiny_model, random_script(source, 400), **options))
    assert num_parks or not options["preempt_every"]


steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), min_size=5, max_size=60)


@given(
    script=steps,
    budget_pages=st.sampled_from([6, 30, 1000]),
    has_disk=st.booleans(),
    deadline_s=st.sampled_from([0.004, 60.0]),
    preempt_every=st.sampled_from([3, 7]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_order_of_events_leaves_anything(
    tiny_model: Model,
    script: list[tuple[str, int]],
    budget_pages: int,
    has_disk: bool,
    deadline_s: float,
    preempt_every: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(
            play(
                tiny_model,
                script,
                budget_pages=budget_pages,
                disk=folder if has_disk else None,
                deadline_s=deadline_s,
                preempt_every=preempt_every,
            )
        )
        assert list(Path(folder).iterdir()) == []


def test_memory_that_comes_after_the_last_client_has_left_goes_back(tiny_model: Model) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(30), crowd_of(tiny_model, preempt_every=7) as crowd:
            crowd.memory.gate.clear()
            await crowd.act("chat", 60)
            while not crowd.engine._parking.arena.is_growing:
                await asyncio.sleep(TICK_S)
            crowd.clients[0].cancel()
            while crowd.handle.snapshot.slots[0].state != "idle":
                await asyncio.sleep(TICK_S)
            assert crowd.engine._parking.held_bytes > 0, "it counts from the moment it is asked for"
            crowd.memory.gate.set()
            await crowd.check_nothing_is_left()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["park", "restore", "landed"])
def test_an_engine_that_fails_between_a_plan_and_its_copies_loses_no_page(tiny_model: Model, name: str) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(30), crowd_of(tiny_model, preempt_every=7) as crowd:
            crowd.stream.open()
            parking = crowd.engine._parking
            real, calls = getattr(parking, name), [0]

            def failing(*given: object, **more: object) -> object:
                result = real(*given, **more) if name == "landed" else None
                calls[0] += bool(result) or name != "landed"
                if calls[0] == 2:
                    calls[0] += 1
                    raise RuntimeError("a bug")
                return result if name == "landed" else real(*given, **more)

            setattr(parking, name, failing)
            for seed in range(3):
                crowd.clients.append(crowd.handle.submit([request(seed, 20, 40)], str(seed)))
            for client in crowd.clients:
                async for _ in client:
                    pass
            assert calls[0] > 2, "nothing has failed"
            await crowd.check_nothing_is_left()
            again = [event async for event in crowd.handle.submit([request(1, 20, 5)], "again")]
            assert type(again[-1]).__name__ == "Finished", "the server goes on"
            await settle(crowd.handle)
            await crowd.check_nothing_is_left()

    asyncio.run(scenario())
