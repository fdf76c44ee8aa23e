"""Steps that run in the program's own thread: started, one behind another, and collected in turn."""

from __future__ import annotations

import select

import pytest
import torch

from pyserve.ops import BROKEN_ROW, Program, StepBatch, Weighing
from tests.ops.paged import ints
from tests.ops.small_model import SmallModel, batch_of
from tests.ops.weighed import check_picked, picked_by_the_program, picked_by_the_sampler

PAGE_TABLE = ints([[3, 2, -1], [0, 1, -1], [4, 5, -1]])
GREEDY = (torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64))


def prompts() -> StepBatch:
    return batch_of([(0, 0, [5, 9, 2]), (1, 0, [7]), (2, 0, [1, 3])], PAGE_TABLE)


def tables(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return GREEDY[0][:num_rows], GREEDY[1][:num_rows], GREEDY[2]


def wait(program: Program, num_steps: int) -> None:
    while num_steps > 0:
        assert select.select([program.fileno()], [], [], 10)[0], "no step was done in 10 s"
        num_steps -= program.num_done()
    assert num_steps == 0


def sample_rows(batch: StepBatch) -> StepBatch:
    """The last row of each sequence is sampled."""
    last = [i for i, s in enumerate(batch.sequences.tolist()) if batch.sequences.tolist()[i + 1 : i + 2] != [s]]
    return StepBatch(batch.tokens, batch.positions, batch.sequences, batch.page_table, ints(last))


def test_a_step_behind_another_takes_its_tokens_from_it() -> None:
    model = SmallModel()
    first = sample_rows(prompts())
    program, kv = model.program(), model.pool(6, 4)
    program.start(first, kv, *tables(3))
    behind = StepBatch(ints([0, 0]), ints([2, 3]), ints([2, 0]), PAGE_TABLE, ints([0, 1]))  # sequence 1 has ended
    program.start(behind, kv, *tables(2), ints([2, 0]))
    wait(program, 2)
    picked, next_picked = program.collect(), program.collect()

    other, other_kv = model.program(), model.pool(6, 4)
    wanted = other.run(first, other_kv).argmax(1).int()
    assert torch.equal(picked, wanted)
    known = StepBatch(wanted[[2, 0]].contiguous(), *[getattr(behind, name) for name in StepBatch.__slots__[1:]])
    assert torch.equal(next_picked, other.run(known, other_kv).argmax(1).int())
    assert torch.equal(kv, other_kv)


def test_a_row_that_is_broken_leaves_the_step_behind_it_to_the_others() -> None:
    """Everything is banned in sequence 1, so that there is no token for the step behind to compute."""
    model = SmallModel()
    program, kv = model.program(), model.pool(6, 4)
    every = torch.arange(program.vocab_size)
    bans = torch.stack([torch.ones_like(every), every], 1)
    program.start(sample_rows(prompts()), kv, *tables(3)[:2], bans)
    behind = StepBatch(ints([0, 0, 0]), ints([3, 1, 2]), ints([0, 1, 2]), PAGE_TABLE, ints([0, 1, 2]))
    program.start(behind, kv, *tables(3), ints([0, 1, 2]))
    picked, next_picked = program.collect(), program.collect()

    other, other_kv = model.program(), model.pool(6, 4)
    other.start(sample_rows(prompts()), other_kv, *tables(3))
    other.start(behind, other_kv, *tables(3), ints([0, 1, 2]))
    wanted, next_wanted = other.collect(), other.collect()
    assert picked.tolist() == [wanted[0], BROKEN_ROW, wanted[2]]
    assert next_picked[[0, 2]].tolist() == next_wanted[[0, 2]].tolist()


def test_two_steps_at_most_are_started() -> None:
    model = SmallModel()
    program, kv = model.program(), model.pool(6, 4)
    behind = StepBatch(ints([0]), ints([1]), ints([1]), PAGE_TABLE, ints([0]))
    with pytest.raises(ValueError, match="no step was started before"):
        program.start(behind, kv, *tables(1), ints([1]))
    program.start(sample_rows(prompts()), kv, *tables(3))
    program.start(behind, kv, *tables(1), ints([1]))
    with pytest.raises(ValueError, match="two at a time"):
        program.start(behind, kv, *tables(1), ints([0]))
    assert program.collect().shape == (3,)
    assert program.collect().shape == (1,)
    with pytest.raises(ValueError, match="no step was started"):
        program.collect()


def test_a_step_behind_one_that_failed_fails_too() -> None:
    model = SmallModel()
    program, kv = model.program(), model.pool(6, 4)
    bad = sample_rows(batch_of([(0, 0, [10**6])], PAGE_TABLE))
    program.start(bad, kv, *tables(1))
    behind = StepBatch(ints([0]), ints([1]), ints([0]), PAGE_TABLE, ints([0]))
    program.start(behind, kv, *tables(1), ints([0]))
    wait(program, 2)
    with pytest.raises(ValueError, match="tokens"):
        program.collect()
    with pytest.raises(ValueError, match="the step before it failed"):
        program.collect()
    assert not kv.any()
    program.start(sample_rows(prompts()), kv, *tables(3))
    assert program.collect().shape == (3,)


def test_sources_name_sample_rows_of_the_step_before() -> None:
    model = SmallModel()
    program, kv = model.program(), model.pool(6, 4)
    program.start(sample_rows(prompts()), kv, *tables(3))
    behind = StepBatch(ints([0]), ints([1]), ints([1]), PAGE_TABLE, ints([0]))
    with pytest.raises(ValueError, match="sources"):
        program.start(behind, kv, *tables(1), ints([3]))
    with pytest.raises(ValueError, match=r"sources\[0\] is -2: must be in -1..2"):
        program.start(behind, kv, *tables(1), ints([-2]))
    with pytest.raises(ValueError, match="sources must be as many as tokens: 1, not 2"):
        program.start(behind, kv, *tables(1), ints([0, 1]))
    unknown = StepBatch(ints([-1]), ints([1]), ints([1]), PAGE_TABLE, ints([0]))
    with pytest.raises(ValueError, match=r"tokens\[0\] is -1"):
        program.start(unknown, kv, *tables(1), ints([-1]))
    assert program.collect().shape == (3,)


def test_biases_penalties_and_bans_are_the_samplers_also_for_tokens_that_were_not_known() -> None:
    model = SmallModel()
    table = torch.arange(36, dtype=torch.int32).reshape(6, 6)
    picked = picked_by_the_program(model.program(), model.pool(36, 4), table, 9)
    check_picked(picked, picked_by_the_sampler(model.program(), model.pool(36, 4), table, 9))


def test_what_is_wrong_with_changes_of_logits_is_said() -> None:
    model = SmallModel()
    program, kv = model.program(), model.pool(6, 4)

    def start(penalties: torch.Tensor, places: list[list[int]], values: list[list[float]]) -> None:
        weighing = Weighing(penalties, torch.tensor(places), torch.tensor(values))
        program.start(sample_rows(prompts()), kv, *tables(3), None, weighing)

    none = torch.tensor([[1.0, 0.0, 0.0]]).repeat(3, 1)
    with pytest.raises(ValueError, match=r"penalties must be \[3, 3\]"):
        start(none[:2], [[0, 1]], [[1.0, 0.0]])
    with pytest.raises(ValueError, match="places: row 3 is not in the step"):
        start(none, [[3, 1]], [[1.0, 0.0]])
    with pytest.raises(ValueError, match="places: id 100 is not in the vocabulary"):
        start(none, [[0, 100]], [[1.0, 0.0]])
    with pytest.raises(ValueError, match="places must be in the order of their rows"):
        start(none, [[2, 1], [1, 1]], [[1.0, 0.0], [1.0, 0.0]])
        program.collect()
    with pytest.raises(ValueError, match=r"values must be \[1, 2\]"):
        start(none, [[0, 1]], [[1.0, 0.0], [1.0, 0.0]])
