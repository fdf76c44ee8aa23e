"""The allocator keeps a sequence's pages together, so that a park is a handful of copies (R16)."""

from __future__ import annotations

import statistics

import pytest

from bench.fragmentation import MIXES, LastInFirstOut, measure
from pyserve.ledger import Ledger
from pyserve.plan import Limits
from pyserve.residents import EVICTED_AT_ONCE
from pyserve.sequence import Sequence
from pyserve.types import SamplingParams, SequenceRequest


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_sequences", [2, 5, 16])
def test_a_park_of_2000_tokens_is_at_most_80_copies(mix: str, num_sequences: int) -> None:
    pieces = measure(mix, num_sequences, 16)
    assert len(pieces.copies) >= num_sequences
    assert max(pieces.copies) <= 80


@pytest.mark.parametrize(("mix", "num_sequences"), [("turnover", 3), ("pressure", 12), ("at once", 12)])
def test_pages_of_one_token_leave_hardly_more_copies(mix: str, num_sequences: int) -> None:
    """They are handed out in blocks; one by one they made 176 copies, with three sequences. Parks that land at once
    need no runway, but without one the blocks were taken apart: 110 copies, with twelve.
    """
    assert max(measure(mix, num_sequences, 1).copies) <= 80


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_a_plain_free_list_leaves_more_than_twice_as_many_runs(mix: str, page_size: int) -> None:
    plain, ours = (statistics.mean(measure(mix, 4, page_size, pool).runs) for pool in (LastInFirstOut, None))
    assert ours * 2 < plain


def test_cached_prompts_give_way_a_stretch_at_a_time_and_no_more_than_a_sixteenth_of_the_pool() -> None:
    ledger = Ledger(Limits(num_pages=160, page_size=4, num_slots=2, is_async=False, runway_steps=0))
    for id, prompt_len in enumerate((600, 40)):
        prompt = tuple(range(1000 * id, 1000 * id + prompt_len))
        sequence = Sequence(id, SequenceRequest(prompt, SamplingParams(), max_tokens=100), id)
        ledger.submit([sequence])
        for step in range(4):
            plan = ledger.apply(ledger.plan(float(step), 0), float(step))
            ledger.step_done(plan.rows, [7 for row in plan.rows if row.samples])
        if id == 0:
            ledger.finish(sequence, 0.0)
    assert ledger.cached_pages + ledger.free_pages == 160 - len(sequence.pages)
    assert ledger.free_pages == 10, "beside the page that it asked for"


def test_of_many_small_cached_pages_only_so_many_give_way_at_once() -> None:
    """Each takes its time, and the loop waits."""
    ledger = Ledger(Limits(num_pages=20000, page_size=1, num_slots=64, is_async=False))
    for id in range(65):
        prompt = tuple(range(19000)) if id == 0 else (id,)
        ledger.submit([Sequence(id, SequenceRequest(prompt, SamplingParams(), max_tokens=200), id)])
        if id == 0:
            ledger.step_done(ledger.apply(ledger.plan(0.0, 0), 0.0).rows, [])
    num_evicted = []
    for step in range(100):
        plan = ledger.apply(ledger.plan(float(step), 0), float(step))
        num_evicted.append(plan.num_evictions)
        ledger.step_done(plan.rows, [7 for row in plan.rows if row.samples])
        if len(ledger.running()) and step == 30:
            ledger.finish(next(each for each in ledger.running() if each.id == 0), float(step))
    assert 0 < max(num_evicted) <= EVICTED_AT_ONCE + 64
