"""What an iteration costs beside the model: plan, apply and step_done of the real ledger, and page lists made runs.

    make bench, or: python -m pytest bench/test_planner_speed.py -s

All sequences generate and nothing changes but their lengths; each is at another place of its page, as in life. The
limits that the figures stand beside: 50 us at p99 for the plan of 256 sequences, 60 us + 0.5 us per row for the engine
without the model, 1 ms for the combs of 131,072 pages and 50 us for 2,000, and 1 ms for a step that has to evict.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pyserve.ledger import Ledger, Limits
from pyserve.ops import comb_table
from pyserve.sequence import Sequence
from pyserve.types import SamplingParams, SequenceRequest

NUM_PAGES, PAGE_SIZE = 131_072, 16
HOST_PAGES = 1 << 20


def steady_ledger(num_sequences: int) -> Ledger:
    """Everybody admitted, computed and generating."""
    ledger = Ledger(Limits(NUM_PAGES, PAGE_SIZE, num_sequences, batch_tokens=8192))
    dice = random.Random(1)
    for id in range(num_sequences):
        prompt = tuple(dice.choices(range(1000), k=dice.randint(100, 300)))
        ledger.submit([Sequence(id, SequenceRequest(prompt, SamplingParams(), None), id)])
    while any(each.num_pending != 1 for each in ledger.live()):
        step(ledger, [])
    return ledger


def step(ledger: Ledger, picked: list[int]) -> None:
    plan = ledger.apply(ledger.plan(0.0, HOST_PAGES), 0.0)
    ledger.step_done(plan.rows, picked or [7 for row in plan.rows if row.samples])


def report(benchmark: Any, num_rows: int) -> None:
    times = sorted(benchmark.stats.stats.data)
    median, p99 = times[len(times) // 2] * 1e6, times[len(times) * 99 // 100] * 1e6
    print(f"\nmedian {median:.1f} us, p99 {p99:.1f} us, {1e3 * median / num_rows:.0f} ns per row or page")


@pytest.mark.parametrize("num_sequences", [16, 64, 256])
def test_plan(benchmark: Any, num_sequences: int) -> None:
    ledger = steady_ledger(num_sequences)
    plan = benchmark.pedantic(ledger.plan, args=(0.0, HOST_PAGES), warmup_rounds=50, rounds=3000)
    assert len(plan.rows) == num_sequences
    report(benchmark, num_sequences)


@pytest.mark.parametrize("num_sequences", [16, 64, 256])
def test_plan_apply_and_step_done(benchmark: Any, num_sequences: int) -> None:
    ledger = steady_ledger(num_sequences)
    before = sum(len(each.tokens) for each in ledger.live())
    benchmark.pedantic(step, args=(ledger, [7] * num_sequences), warmup_rounds=50, rounds=3000)
    assert sum(len(each.tokens) for each in ledger.live()) == before + 3050 * num_sequences
    report(benchmark, num_sequences)


def test_steps_that_evict(benchmark: Any) -> None:
    """64 rows that take a page of one token each, from a pool of 100,000 that is full of finished chats: every twelfth
    step evicts, which p99 shows.
    """
    ledger = Ledger(Limits(100_000, 1, 64, batch_tokens=8192))
    dice = random.Random(1)
    for id in range(98 + 64):
        is_chat = id < 98
        prompt = tuple(dice.choices(range(1000), k=1000 if is_chat else 100))
        ledger.submit([Sequence(id, SequenceRequest(prompt, SamplingParams(), None), id)])
        if is_chat:
            step(ledger, [])
            ledger.finish(next(iter(ledger.running())), 0.0)
    while ledger.free_pages > 3000:
        step(ledger, [])
    benchmark.pedantic(step, args=(ledger, []), warmup_rounds=50, rounds=1000)
    report(benchmark, 64)
    assert sum(each.num_parks for each in ledger.live()) == 0


def interleaved(num_pages: int, num_sequences: int) -> list[int]:
    """The pages of one of several sequences that grew side by side from an empty pool, in turns of uneven length."""
    dice = random.Random(2)
    pages: list[int] = []
    page = 0
    while len(pages) < num_pages:
        count = dice.randint(1, 8)
        pages.extend(range(page, page + count))
        page += count * num_sequences
    return pages[:num_pages]


@pytest.mark.parametrize("num_pages", [2_000, 131_072])
@pytest.mark.parametrize("kind", ["one run", "four growing", "every second"])
@pytest.mark.parametrize("form", ["park", "list"])
def test_comb_table(benchmark: Any, num_pages: int, kind: str, form: str) -> None:
    """`park`: as parks have it, from a copy of the row of the page table. A restore has the same once its pages are in
    that row; what it takes to read them from their list is the difference to `list`.
    """
    pages = {
        "one run": list(range(num_pages)),
        "four growing": interleaved(num_pages, 4),
        "every second": list(range(0, 2 * num_pages, 2)),
    }[kind]
    row = np.array(pages, dtype=np.int32)
    combs = (lambda: comb_table(row.copy())) if form == "park" else (lambda: comb_table(pages))
    table = benchmark.pedantic(combs, warmup_rounds=2, rounds=100 if num_pages < 10_000 else 20)
    assert (table[:, 1] * table[:, 3]).sum() == num_pages
    print(f"\n{len(table)} combs", end="")
    report(benchmark, num_pages)
