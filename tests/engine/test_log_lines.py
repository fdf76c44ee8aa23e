"""What the log says of parks and restores, and of an engine in which nothing moves (R12, R34b)."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.plan import Plan
from pyserve.serving import build_engine
from pyserve.settings import Settings
from tests.engine.workload import GREEDY, four_chats, request, run

PARK = re.compile(
    r"park request=request-\d index=0 reason=(pool_full|rotation|forced) tier=ram tokens=\d+ bytes=[1-9]\d* "
    r"copy_ms=\d+\.\d free_pages=\d+->\d+ n=[1-9]\d*"
)
RESTORE = re.compile(
    r"restore request=request-\d index=0 tokens=\d+ bytes=\d+ copy_ms=\d+\.\d parked_ms=\d+ free_pages=\d+ n=[1-9]\d*"
)


@pytest.mark.parametrize("preempt_every", [0, 16])
def test_each_park_and_each_restore_is_one_line_with_its_figures(
    tiny_model: Model, caplog: pytest.LogCaptureFixture, preempt_every: int
) -> None:
    caplog.set_level(logging.INFO, "pyserve.park")
    chats = [[chat] for chat in four_chats(GREEDY)]
    result = run(tiny_model, chats, ctx_size=256, parallel=4, page_size=4, preempt_every=preempt_every)
    lines = [record.getMessage() for record in caplog.records if record.name == "pyserve.park"]
    parks = [line for line in lines if line.startswith("park ")]
    restores = [line for line in lines if line.startswith("restore ")]
    assert len(parks) == result.preempts > 0 and len(restores) == result.resumes
    assert [line for line in parks if not PARK.fullmatch(line)] == []
    assert [line for line in restores if not RESTORE.fullmatch(line)] == []
    assert sum(int(line.split("bytes=")[1].split()[0]) for line in parks) == result.counters.parked_bytes


def test_an_engine_in_which_nothing_moves_says_so_once_and_goes_on_when_it_can(
    tiny_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        engine = build_engine(tiny_model, Settings(ctx_size=256, parallel=2), num_threads=1)
        handle = EngineHandle(engine)
        real = engine._ledger.plan
        engine._ledger.plan = lambda *given: Plan()  # type: ignore[method-assign]
        await handle.start()
        generation = handle.submit([request(1, 20, 5)], "r")
        async with asyncio.timeout(20):
            while not handle.snapshot.is_stuck:
                await asyncio.sleep(0.01)
            handle.submit([request(2, 20, 5)], "another").cancel()
            await asyncio.sleep(0.1)
            assert handle.snapshot.is_stuck
            engine._ledger.plan = real  # type: ignore[method-assign]
            async for _ in generation:
                pass
        assert not handle.snapshot.is_stuck
        await handle.stop()

    asyncio.run(scenario())
    told = [record for record in caplog.records if "nothing runs and no copy is in flight" in record.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.ERROR
