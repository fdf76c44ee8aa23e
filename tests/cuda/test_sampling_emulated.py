"""Steps whose tokens are drawn on the device, and KV in f32, through the whole backend (R37)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.models.load import Model, load
from pyserve.ops import StepBatch
from tests.ops.weighed import check_picked, picked_by_the_program, picked_by_the_sampler
from tools.make_tiny_model import make_gguf

TABLE = torch.arange(12, dtype=torch.int32).reshape(3, 4)
LIMITS = {"max_tokens": 48, "max_samples": 16, "max_positions": 64, "num_threads": 1}
REAL = torch.tensor([[0.9, 0.95, 0.0], [0.0, 1.0, 0.0], [1.3, 1.0, 0.02]])  # temperature, top_p, min_p
WHOLE = torch.tensor([[40, 7, 3], [0, 1, 1], [0, -5, 9]])  # top_k, seed, position
BANS = torch.tensor([[0, 65], [2, 66], [0, 65]])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        type="Q8_0", seed=7, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=64,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def model(opened: ops.Device, path: Path) -> Model:
    return load(path, device=opened, **LIMITS)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(position: int, tokens: list[int]) -> StepBatch:
    return StepBatch(ints(tokens), ints([position] * 3), ints([0, 1, 2]), TABLE, ints([0, 1, 2]))


def picked_on_host(logits: torch.Tensor, whole: torch.Tensor) -> list[int]:
    logits = logits.clone()
    logits[BANS[:, 0], BANS[:, 1]] = float("-inf")
    return [
        torch.ops.pyserve.sample_row(row, temperature, top_k, top_p, min_p, seed, position)
        for row, (temperature, top_p, min_p), (top_k, seed, position) in zip(
            logits, REAL.tolist(), whole.tolist(), strict=True
        )
    ]


def new_pool(device: ops.Device, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return device.allocate_pool(12, 2, 1, 16, 64, dtype)


def test_started_steps_draw_what_the_cpus_sampler_picks(opened: ops.Device, model: Model) -> None:
    """One step, and one behind it whose tokens the host has not seen."""
    pool, program = new_pool(opened), model.program
    program.start(step(0, [60, 61, 62]), pool, REAL, WHOLE, BANS)
    program.start(step(1, [0, 0, 0]), pool, REAL, WHOLE + 1, BANS, ints([0, 1, 2]))
    first, second = program.collect().tolist(), program.collect().tolist()
    again = new_pool(opened)
    assert first == picked_on_host(program.run(step(0, [60, 61, 62]), again), WHOLE)
    assert second == picked_on_host(program.run(step(1, first), again), WHOLE + 1)
    assert len({*first, *second}) > 2


@pytest.mark.parametrize("is_greedy", [False, True])
def test_behind_a_broken_row_the_others_go_on(opened: ops.Device, model: Model, is_greedy: bool) -> None:
    """Everything is banned in row 1: the device has no token for the row behind it, and the host is told of none."""
    real = torch.zeros(3, 3) if is_greedy else REAL
    every = torch.arange(model.program.vocab_size)
    bans = torch.stack([torch.ones_like(every), every], 1)
    found = []
    for banned in (BANS[:0], bans):
        pool, program = new_pool(opened), model.program
        program.start(step(0, [60, 61, 62]), pool, real, WHOLE, banned)
        program.start(step(1, [0, 0, 0]), pool, real, WHOLE + 1, BANS[:0], ints([0, 1, 2]))
        found.append([program.collect().tolist(), program.collect().tolist()])
    (first, second), (first_banned, second_banned) = found
    assert first_banned == [first[0], ops.BROKEN_ROW, first[2]]
    assert [second_banned[0], second_banned[2]] == [second[0], second[2]]


def test_a_prompt_is_drawn_from_and_the_next_step_follows_it(opened: ops.Device, model: Model) -> None:
    """Sampled rows of a step that is not a decode step, some of them greedy, then the most probable tokens."""
    pool, program = new_pool(opened), model.program
    prompt = StepBatch(ints([*range(40, 50), 7]), ints([*range(10), 0]), ints([0] * 10 + [1]), TABLE, ints([9, 10]))
    greedy = torch.tensor([[0.0, 1.0, 0.0]] * 2)
    after = StepBatch(ints([0, 0]), ints([10, 1]), ints([0, 1]), TABLE, ints([0, 1]))
    program.start(prompt, pool, REAL[:2], WHOLE[:2], BANS[:1])
    program.start(after, pool, greedy, WHOLE[:2], BANS[:0], ints([0, 1]))
    first, second = program.collect().tolist(), program.collect().tolist()
    again = new_pool(opened)
    logits = program.run(prompt, again).clone()
    logits[0, 65] = float("-inf")
    wanted = [
        torch.ops.pyserve.sample_row(logits[0], *REAL[0, :1].tolist(), 40, *REAL[0, 1:].tolist(), 7, 3),
        int(logits[1].argmax()),
    ]
    assert first == wanted
    known = StepBatch(ints(first), after.positions, after.sequences, TABLE, after.sample_rows)
    assert second == program.run(known, again).argmax(1).tolist()


def test_rows_with_biases_and_penalties_are_drawn_as_on_the_host(opened: ops.Device, model: Model) -> None:
    """Also where the token that the step before picked, unseen by the host, is in the window."""
    table = torch.arange(12, dtype=torch.int32).reshape(6, 2)
    picked = picked_by_the_program(model.program, new_pool(opened), table, 9)
    check_picked(picked, picked_by_the_sampler(model.program, new_pool(opened), table, 9))


def test_with_kv_in_f32_logits_are_near_the_cpus_and_chunks_change_no_bit(
    opened: ops.Device, model: Model, path: Path
) -> None:
    there = load(path, **LIMITS)
    chunk = StepBatch(ints([*range(40, 60)]), ints([*range(20)]), ints([0] * 20), TABLE, ints([18, 19]))
    wanted = there.program.run(chunk, new_pool(there.device, torch.float32))
    got = model.program.run(chunk, new_pool(opened, torch.float32)).clone()
    assert (got - wanted).abs().max() < 0.15  # int8 activations: a last bit can be rounded to the next step
    pool = new_pool(opened, torch.float32)
    for at in range(20):
        row = StepBatch(ints([40 + at]), ints([at]), ints([0]), TABLE, ints([0]))
        one = model.program.run(row, pool)
        if at >= 18:
            assert torch.equal(one[0], got[at - 18])
