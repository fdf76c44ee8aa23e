"""Steps beside the loop: whoever no longer wants one holds up nobody."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pyserve.plan import Rows
from pyserve.runner import Runner, Step, StepResult
from pyserve.slot_sampling import SlotSampling
from pyserve.steps import Begun, Steps


class HeldRunner:
    """Its steps are done when the test says so; those in `failing` fail."""

    can_follow = True

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self._reader, self._writer = os.pipe()
        self._failing = failing
        self._num_collected = 0

    def start(self, step: Step) -> None:
        pass

    def fileno(self) -> int:
        return self._reader

    def num_done(self) -> int:
        return len(os.read(self._reader, 64))

    def collect(self, step: Step) -> StepResult:
        self._num_collected += 1
        if self._num_collected in self._failing:
            raise RuntimeError("the step failed")
        return StepResult([])

    def end(self, count: int) -> None:
        os.write(self._writer, b"x" * count)


def plain_step() -> Step:
    return Step(Rows(), cast(Any, None), [], SlotSampling(1).take([], np.empty(0, np.int32)), sources=torch.empty(0))


@pytest.mark.parametrize("failing", [(), (1,), (2,), (1, 2)])
def test_a_step_that_nobody_waits_for_any_more_does_not_keep_the_one_behind_it(failing: tuple[int, ...]) -> None:
    async def scenario() -> tuple[Begun, Begun]:
        runner = HeldRunner(failing)
        steps = Steps(cast(Runner, runner))
        steps.open()
        first, second = steps.start(plain_step()), steps.start(plain_step())
        first.done.cancel()
        runner.end(2)
        async with asyncio.timeout(10):
            await steps.close()
        return first, second

    first, second = asyncio.run(scenario())
    assert first.done.cancelled() and second.done.done()
    assert (second.done.exception() is None) == (2 not in failing)


def test_a_step_with_log_probabilities_is_waited_for_too() -> None:
    """Whoever abandons it then frees the pages that it writes to."""
    is_let_through = threading.Event()

    class SlowRunner(HeldRunner):
        def run(self, step: Step) -> StepResult:
            is_let_through.wait(10)
            return StepResult([])

    async def scenario() -> tuple[bool, bool]:
        steps = Steps(cast(Runner, SlowRunner()))
        steps.open()
        begun = steps.start(replace(plain_step(), scored=[cast(Any, None)]))
        abandoning = asyncio.create_task(steps.abandon())
        await asyncio.sleep(0.05)
        was_left = abandoning.done()
        is_let_through.set()
        await abandoning
        is_done = begun.done.done()
        await steps.close()
        return was_left, is_done

    assert asyncio.run(scenario()) == (False, True)
