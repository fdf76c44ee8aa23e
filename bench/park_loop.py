"""What it takes of the event loop to park one large sequence and to bring it back: `python -m bench.park_loop`.

Ledger, planner, parking and page table as the engine has them, without a model: one sequence of 131,072 pages of one
token, or of 8,192 of 16, generates and is parked every four tokens. Timed is what runs in the loop, call by call; the
copies themselves run in their thread, and nothing is timed meanwhile. While the sequence is parked all that the prompt
cache knows is evicted, as where others need the room, so that the pages have to be copied back and made known again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from pyserve.generation import Generation
from pyserve.kv_store import KvStore
from pyserve.ledger import Ledger, Limits
from pyserve.park import Parking
from pyserve.plan import Plan
from pyserve.runner import Runner
from pyserve.sequence import Sequence, State
from pyserve.task import Task
from pyserve.transfers import Transfers
from pyserve.types import Counters, SamplingParams, SequenceRequest

T = TypeVar("T")

NUM_TOKENS = 131_072
PARK_EVERY = 4
PARTS = (
    "park: plan", "park: apply", "park: post the copy", "park: the copy has landed",
    "restore: plan", "restore: apply", "restore: post the copy", "restore: the copy has landed",
    "each step then",
)  # fmt: skip


class OnePark:
    """A sequence that is parked again and again."""

    def __init__(self, page_size: int) -> None:
        num_pages = 2 * NUM_TOKENS // page_size
        kv = KvStore(num_pages=num_pages, num_layers=1, num_kv_heads=1, page_size=page_size, head_dim=8, kv_type="f16")
        self.parking = Parking(kv, budget_bytes=1 << 30)
        self.ledger = Ledger(
            Limits(num_pages, page_size, num_slots=1, batch_tokens=NUM_TOKENS, preempt_every=PARK_EVERY)
        )
        self._runner = Runner(None, kv, num_slots=1, pages_per_sequence=num_pages)  # type: ignore[arg-type]
        dice, generation = random.Random(1), Generation(1, lambda index, is_complete: None)
        prompt = tuple(dice.randrange(50_000) for _ in range(NUM_TOKENS - 256))
        self.sequence = Sequence(0, SequenceRequest(prompt, SamplingParams()), 0)
        tasks = {0: Task(self.sequence, generation, "bench", submitted_s=time.monotonic(), end_len=2 * NUM_TOKENS)}
        self._transfers = Transfers(
            self.ledger, self.parking, self._runner.pages_of, tasks, Counters(), lambda task, event: None
        )
        self.ledger.submit([self.sequence])
        self.times_ms: dict[str, list[float]] = {part: [] for part in PARTS}

    def round(self) -> None:
        """Once out and back."""
        while self.sequence.num_generated // PARK_EVERY <= self.sequence.num_forced_parks:
            self._time("each step then", self._step)
        self._transfers.prepare()
        while self.parking.arena.is_growing:
            self.parking.landed()
        self._move("park", State.PREEMPTED)
        self.ledger._view.cache.evict(self.ledger.cached_pages)
        self._move("restore", State.RUNNING)

    def _move(self, way: str, state: State) -> None:
        plan = self._time(f"{way}: plan", self._plan)
        plan = self._time(f"{way}: apply", lambda: self._apply(plan))
        self._time(f"{way}: post the copy", lambda: self._transfers.start(plan.parks, plan.restores))
        for copy in self.parking.copies:
            copy.wait(60)
        self._time(f"{way}: the copy has landed", self._transfers.collect)
        assert self.sequence.state is state and (not plan.restores or plan.restores[0].tier.is_copy)

    def _step(self) -> None:
        plan = self._apply(self._plan())
        self._runner.prepare(plan.rows)
        self.ledger.step_done(plan.rows, [7] * len(plan.rows))

    def _plan(self) -> Plan:
        return self._transfers.plan(time.monotonic())

    def _apply(self, plan: Plan) -> Plan:
        return self.ledger.apply(plan, time.monotonic() * 1e3)

    def _time(self, part: str, run: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        result = run()
        self.times_ms[part].append((time.perf_counter() - started_s) * 1e3)
        return result


def measure(page_size: int, num_rounds: int) -> dict[str, float]:
    """Milliseconds by part, medians."""
    one = OnePark(page_size)
    for _ in range(num_rounds + 1):
        one.round()
    one.parking.close()
    return {part: statistics.median(times[1:]) for part, times in one.times_ms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    page_sizes = (1, 16)
    found = [measure(page_size, chosen.rounds) for page_size in page_sizes]
    print(f"| ms of the loop | {' | '.join(f'{NUM_TOKENS // size:,} pages of {size}' for size in page_sizes)} |")
    print(f"| --- |{' --- |' * len(page_sizes)}")
    for part in PARTS:
        print(f"| {part} | {' | '.join(f'{each[part]:.2f}' for each in found)} |")
    for way in ("park", "restore"):
        sums = [sum(ms for part, ms in each.items() if part.startswith(way)) for each in found]
        print(f"| {way}, all | {' | '.join(f'{each:.2f}' for each in sums)} |")


if __name__ == "__main__":
    main()
