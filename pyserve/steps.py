"""Steps that run beside the event loop, and the futures that say what they gave.

A plain step runs in the program's own thread, which needs no interpreter lock and tells the loop through a descriptor;
one may wait there behind another. Any other step runs in an interpreter's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pyserve.plan import Rows
from pyserve.runner import Runner, Step, StepResult


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that runs, or waits behind one that does."""

    step: Step
    done: asyncio.Future[StepResult]
    started_s: float  # time.monotonic()


class Steps:
    """Starts the steps of one runner, from one event loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._begun: deque[Begun] = deque()  # the plain ones that are not done, oldest first
        self._other: asyncio.Future[StepResult] | None = None  # the latest that is not plain
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="pyserve-compute")

    def open(self) -> None:
        """From the running loop, before the first step."""
        asyncio.get_running_loop().add_reader(self._runner.fileno(), self._collect)

    async def close(self) -> None:
        """After the last step: waits for those that still write to their sequences' pages."""
        await self.abandon()
        asyncio.get_running_loop().remove_reader(self._runner.fileno())
        self._compute.shutdown()

    def start(self, step: Step) -> Begun:
        """Begin a step and return at once. What goes wrong is in the future too."""
        loop = asyncio.get_running_loop()
        if not step.is_plain:
            self._other = loop.run_in_executor(self._compute, self._runner.run, step)
            return Begun(step, self._other, time.monotonic())
        begun = Begun(step, loop.create_future(), time.monotonic())
        try:
            self._runner.start(step)
        except Exception as error:
            begun.done.set_exception(error)
        else:
            self._begun.append(begun)
        return begun

    def start_behind(self, rows: Rows, sources: list[int]) -> Begun | None:
        """The decode step behind the one that runs: row i computes what that picks for its sample row `sources[i]`, or,
        where that is -1, the token that its sequence has. None: somebody's row is not for the program to sample.
        """
        step = self._runner.prepare_next(rows, sources)
        return self.start(step) if step.is_plain else None

    def repeat(self, begun: Begun) -> Begun:
        """The decode step of the same sequences behind `begun`, a decode step that runs."""
        return self.start(self._runner.repeat(begun.step))

    def can_start_behind(self, begun: Begun) -> bool:
        """Every row of `begun` samples, in the program's thread, and the program takes a second step."""
        has_failed = begun.done.done() and begun.done.exception() is not None
        return not has_failed and begun.step.is_plain and self._runner.can_follow and all(begun.step.rows.samples)

    async def abandon(self) -> None:
        """Waits for every step that was started; nobody wants what they give."""
        futures = [begun.done for begun in self._begun]
        if self._other is not None:
            futures.append(self._other)
        await asyncio.gather(*futures, return_exceptions=True)

    def _collect(self) -> None:
        """The descriptor that says so is readable."""
        for _ in range(self._runner.num_done()):
            begun = self._begun.popleft()
            try:
                result = self._runner.collect(begun.step)
            except Exception as error:
                if not begun.done.cancelled():  # with the engine's task, by whoever could not wait for its end
                    begun.done.set_exception(error)
            else:
                if not begun.done.cancelled():
                    begun.done.set_result(result)
