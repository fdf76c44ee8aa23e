"""The allocator keeps a sequence's pages together, so that a park is a handful of copies (R16)."""

from __future__ import annotations

import random
import statistics

import pytest

from bench.fragmentation import MIXES, LastInFirstOut, measure
from bench.worst_park import Walk, World
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


@pytest.mark.parametrize(
    ("mix", "num_sequences", "page_size"), [("turnover", 32, 1), ("pressure", 32, 1), ("pressure", 64, 4)]
)
def test_many_sequences_take_whole_blocks_too(mix: str, num_sequences: int, page_size: int) -> None:
    """Cached prompts gave way page by page where blocks were left over, and parks left room for the next cells and not
    for the blocks that they are in: up to 149 copies.
    """
    assert max(measure(mix, num_sequences, page_size).copies) <= 80


def test_chats_that_come_and_go_under_pressure_lie_in_whole_blocks() -> None:
    """Turns, common beginnings, groups, hang-ups, and copies that land some steps later in any order: 98 copies."""
    world = World(
        Limits(24000, 1, 32, batch_tokens=512), num_requests=64, shortest=100, long_share=0.6, group_share=0.025,
        common_share=0.1, turn_share=0.1, hang_up_share=0.0005, landing_share=0.3,
    )  # fmt: skip
    outcome = Walk(world, random.Random(1)).run()
    assert outcome.num_parks > 20 and len(outcome.copies) > 60
    assert max(outcome.copies) <= 80


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
        num_evicted = []
        for step in range(30):
            plan = ledger.apply(ledger.plan(float(step), 0), float(step))
            num_evicted.append(plan.num_evictions)
            ledger.step_done(plan.rows, [7 for row in plan.rows if row.samples])
        if id == 0:
            ledger.finish(sequence, 0.0)
    assert ledger.cached_pages + ledger.free_pages == 160 - len(sequence.pages)
    assert num_evicted[0] == 12, "ten pages for its prompt, in whole blocks"
    assert max(num_evicted[1:]) == 10, "when it has filled its last block"


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
