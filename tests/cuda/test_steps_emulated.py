"""Decode steps as CUDA graphs, and steps one behind the other: the same bits as launched and awaited one by one (R37),
padding that writes nothing, and no thread that waits for the device.
"""

from __future__ import annotations

import ctypes
import gc
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.models.load import load
from pyserve.ops import StepBatch
from pyserve.ops.cuda import CudaProgram
from tests.cuda.conftest import IS_EMULATED, finish_torch
from tests.cuda.extension import build_extension
from tools.make_tiny_model import make_gguf

NUM_PAGES, PAGE_SIZE = 40, 4
TABLE = torch.randperm(36, generator=torch.Generator().manual_seed(0)).to(torch.int32).reshape(6, 6)
GREEDY = (0.0, 1.0, 0.0)
Pool = torch.Tensor


@pytest.fixture(scope="module")
def program(opened: ops.Device, tmp_path_factory: pytest.TempPathFactory) -> CudaProgram:
    path: Path = make_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        type="Q8_0", seed=7, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=64,
    )  # fmt: skip
    limits = {"max_tokens": 48, "max_samples": 16, "max_positions": 64, "num_threads": 1}
    made = load(path, device=opened, **limits).program
    assert isinstance(made, CudaProgram)
    return made


@pytest.fixture
def pools(opened: ops.Device) -> Callable[[], Pool]:
    """Makes pools whose pages belong to nobody and are full of NaN."""

    def make() -> Pool:
        pool = opened.allocate_pool(NUM_PAGES, 2, 1, PAGE_SIZE, 64, torch.float16)
        pool.fill_(float("nan"))
        finish_torch()
        return pool

    return make


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prompts(lengths: list[int]) -> StepBatch:
    rows = [(10 + 3 * slot + at, at, slot) for slot, length in enumerate(lengths) for at in range(length)]
    tokens, positions, sequences = map(ints, zip(*rows, strict=True))
    ends = torch.tensor(lengths).cumsum(0).to(torch.int32) - 1
    return StepBatch(tokens, positions, sequences, TABLE, ends.to(torch.int32))


def decode(slots: list[int], tokens: list[int], positions: list[int]) -> StepBatch:
    return StepBatch(ints(tokens), ints(positions), ints(slots), TABLE, torch.arange(len(slots), dtype=torch.int32))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy())


@pytest.fixture
def count(opened: ops.Device) -> Callable[[str], int]:
    """The emulator's counters; on a GPU nothing counts."""
    if not IS_EMULATED:
        return lambda name: 0
    knobs = ctypes.CDLL(str(build_extension()))

    def number(name: str) -> int:
        function = getattr(knobs, f"emulator_num_{name}")
        function.restype = ctypes.c_int64
        return int(function())

    return number


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def with_graph(program: CudaProgram, batch: StepBatch, pool: Pool) -> torch.Tensor:
    """The step's logits, once it has a graph."""
    num_made = program.graph_counts()[0]
    program.run(batch, pool)
    wait_for(lambda: program.graph_counts()[0] > num_made)
    return program.run(batch, pool).clone()


# --- graphs


@pytest.mark.parametrize("slots", [[0], [3, 1, 5], [0, 1, 2, 3, 4, 5]], ids=len)
def test_a_graph_gives_the_bits_of_plain_launches_and_padding_writes_nothing(
    program: CudaProgram, pools: Callable[[], Pool], count: Callable[[str], int], slots: list[int]
) -> None:
    lengths = [7, 1, 9, 4, 2, 11]
    batch = decode(slots, [60 + slot for slot in slots], [lengths[slot] for slot in slots])
    plain, graph = pools(), pools()
    program.use_graphs(False)
    program.run(prompts(lengths), plain)
    wanted = program.run(batch, plain).clone()
    program.use_graphs(True)
    program.run(prompts(lengths), graph)
    got = with_graph(program, batch, graph)
    assert bits(got) == bits(wanted)
    assert bits(graph) == bits(plain)  # the pages of nobody included
    before = count("launches"), count("graph_launches")
    assert bits(program.run(batch, graph)) == bits(wanted)
    assert (count("launches"), count("graph_launches")) == (before[0], before[1] + IS_EMULATED)


def test_steps_of_one_size_share_a_graph_and_a_longer_table_has_another(
    program: CudaProgram, pools: Callable[[], Pool]
) -> None:
    pool = pools()
    program.run(prompts([3, 3, 3, 3, 3, 3]), pool)
    with_graph(program, decode([0, 1, 2], [1, 2, 3], [3, 3, 3]), pool)
    num_made = program.graph_counts()[0]
    program.run(decode([5, 4, 3, 2], [1, 2, 3, 4], [3, 3, 3, 3]), pool)
    time.sleep(0.05)
    assert program.graph_counts()[0] == num_made
    long = ops.StepBatch(
        ints([9]), ints([33]), ints([0]), torch.arange(12, dtype=torch.int32).reshape(1, 12), ints([0])
    )
    filled = pool.nan_to_num_(0.5)
    finish_torch()
    first = program.run(long, filled).clone()
    wait_for(lambda: program.graph_counts()[0] > num_made)
    assert bits(program.run(long, filled)) == bits(first)


def test_another_pool_gets_graphs_of_its_own(program: CudaProgram, pools: Callable[[], Pool]) -> None:
    first, second = pools(), pools()
    batch = decode([0, 2], [5, 6], [0, 0])
    wanted = with_graph(program, batch, first)
    before = bits(first)
    assert bits(with_graph(program, batch, second)) == bits(wanted)
    assert bits(first) == before == bits(second)


def test_a_step_that_cannot_be_recorded_is_launched_as_before(
    program: CudaProgram, pools: Callable[[], Pool], emulator: ctypes.CDLL, opened: ops.Device, tmp_path: Path
) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", seed=7, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=64)
    limits = {"max_tokens": 48, "max_samples": 16, "max_positions": 64, "num_threads": 1}
    other = load(path, device=opened, **limits).program
    assert isinstance(other, CudaProgram)
    pool, batch = pools(), decode([0, 1], [5, 6], [0, 0])
    num_graph_launches = emulator.emulator_num_graph_launches()
    results = set()
    for attempt in range(4):
        emulator.emulator_fail_recordings(ctypes.c_int64(0))
        results.add(bits(other.run(batch, pool)))
        wait_for(lambda: other.graph_counts()[1] == min(attempt + 1, 3))  # noqa: B023
    assert len(results) == 1
    assert other.graph_counts() == (0, 3, "recording a step failed: cudaErrorStreamCaptureInvalidated (901)")
    assert emulator.emulator_num_graph_launches() == num_graph_launches


# --- steps that are started


def tables(count: int, temperature: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    real = torch.tensor([[temperature, 1.0, 0.0]] * count)
    whole = torch.tensor([[0, 11 + row, 5] for row in range(count)])
    return real, whole, torch.zeros((0, 2), dtype=torch.int64)


def wait_for_step(program: CudaProgram, timeout_s: float = 60) -> None:
    ready, _, _ = select.select([program.fileno()], [], [], timeout_s)
    assert ready
    assert program.num_done() >= 1


def drain(program: CudaProgram) -> None:
    """What earlier steps have left to read."""
    while select.select([program.fileno()], [], [], 0)[0]:
        program.num_done()


def steps_alone(program: CudaProgram, pool: Pool, slots: list[int], lengths: list[int], count: int) -> list[list[int]]:
    """Greedy steps behind a prompt, each awaited before the next is made."""
    tokens: list[int] = program.run_greedy(prompts(lengths), pool)[ints(slots).long()].tolist()
    picked = []
    for step in range(count):
        tokens = program.run_greedy(decode(slots, tokens, [lengths[slot] + step for slot in slots]), pool).tolist()
        picked.append(tokens)
    return picked


def test_steps_behind_one_another_pick_what_they_pick_one_by_one_and_nobody_waits(
    program: CudaProgram, pools: Callable[[], Pool], count: Callable[[str], int]
) -> None:
    slots, lengths, num_steps = [4, 0, 2], [5, 1, 6, 3, 2, 4], 8
    wanted = steps_alone(program, pools(), slots, lengths, num_steps)
    pool = pools()
    tokens: list[int] = program.run_greedy(prompts(lengths), pool)[ints(slots).long()].tolist()
    with_graph(program, decode(slots, tokens, [lengths[slot] for slot in slots]), pool)
    sources = ints([0, 1, 2])

    drain(program)

    def start(step: int) -> None:
        batch = decode(slots, tokens if step == 0 else [0, 0, 0], [lengths[slot] + step for slot in slots])
        program.start(batch, pool, *tables(3), None if step == 0 else sources)

    start(0)
    wait_for_step(program)  # its graph, with the tokens picked, may be recorded after it
    assert program.collect().tolist() == wanted[0]
    gc.collect()  # what other tests left behind waits as it goes
    num_waits = count("waits")
    got = []
    start(0)
    for step in range(1, num_steps):
        start(step)
        wait_for_step(program)
        got.append(program.collect().tolist())
    with pytest.raises(ValueError, match="two at a time"):
        start(1), start(1)
    wait_for_step(program)
    got.append(program.collect().tolist())
    program.collect()
    assert got == wanted
    assert count("waits") == num_waits


def test_copies_beside_a_step_wait_for_those_that_were_collected_and_not_for_it(
    program: CudaProgram, pools: Callable[[], Pool], emulator: ctypes.CDLL, opened: ops.Device
) -> None:
    """R15: a park of a sequence that the step leaves out, and a restore into a page that is nobody's."""
    pool, written, free = pools(), int(TABLE[1, 0]), 38
    drain(program)
    program.start(decode([0, 1], [5, 6], [0, 0]), pool, *tables(2))
    wait_for_step(program)
    program.collect()
    stream, num_bytes = opened.copy_stream(), ops.page_bytes(pool)
    host, parked = (opened.pinned(torch.full((num_bytes,), 7, dtype=torch.uint8)) for _ in range(2))
    wanted = bits(pool[written])
    emulator.emulator_slow_launches(20_000)
    program.start(decode([0], [7], [1]), pool, *tables(1))
    wait_for(lambda: emulator.emulator_num_outstanding() > 0)  # a thread of the program's posts it
    for event in (stream.copy_pages(pool, parked, [written], True), stream.copy_pages(pool, host, [free], False)):
        assert event.wait(60)
    assert not select.select([program.fileno()], [], [], 0)[0], "the step has ended first"
    emulator.emulator_slow_launches(0)
    assert bits(parked) == wanted
    assert bits(pool[free]) == bits(host)
    wait_for_step(program)
    program.collect()
    stream.close()


def test_a_step_that_could_not_be_posted_as_a_whole_is_done_when_the_rest_has_run(
    program: CudaProgram, pools: Callable[[], Pool], emulator: ctypes.CDLL
) -> None:
    """R20, R26: its sequences' pages come free with it, and it still writes to them until then."""
    pool, batch = pools(), decode([0], [5], [0])
    wanted = program.run_greedy(batch, pool).tolist()
    drain(program)
    emulator.emulator_slow_launches(3000)
    emulator.emulator_fail_posts(ctypes.c_int64(1))  # the batch goes up, the kernels run, the tokens cannot come back
    program.start(batch, pool, *tables(1))
    wait_for_step(program)
    assert emulator.emulator_num_outstanding() == 0
    with pytest.raises(RuntimeError, match="reading tokens back failed"):
        program.collect()
    emulator.emulator_slow_launches(0)
    assert program.run_greedy(batch, pool).tolist() == wanted


def test_rows_that_the_host_samples_are_picked_as_after_a_run(program: CudaProgram, pools: Callable[[], Pool]) -> None:
    batch, pool = prompts([4, 2, 3]), pools()
    real, whole, _ = tables(3, temperature=1.5)
    bans = torch.tensor([[0, 3], [2, 9]])
    logits = program.run(batch, pool).clone()
    logits[bans[:, 0], bans[:, 1]] = float("-inf")
    wanted = program.sample(logits, real, whole).tolist()
    following = decode([0, 1, 2], wanted, [4, 2, 3])
    after = program.run_greedy(following, pool).tolist()
    program.start(batch, pool, real, whole, bans)
    unknown = decode([0, 1, 2], [0, 0, 0], [4, 2, 3])
    program.start(unknown, pool, *tables(3), ints([0, 1, 2]))
    assert program.collect().tolist() == wanted
    assert program.collect().tolist() == after


def test_a_step_that_fails_says_so_and_so_does_the_one_behind_it(
    program: CudaProgram, pools: Callable[[], Pool], emulator: ctypes.CDLL
) -> None:
    pool = pools()
    program.start(decode([0], [5], [1000]), pool, *tables(1))
    program.start(decode([0], [0], [1]), pool, *tables(1), ints([0]))
    with pytest.raises(ValueError, match="positions"):
        program.collect()
    with pytest.raises(ValueError, match="the step before it failed"):
        program.collect()
    with pytest.raises(ValueError, match="sources"):
        program.start(decode([0], [0], [1]), pool, *tables(1), ints([7]))
    batch = decode([0], [5], [0])
    wanted = program.run_greedy(batch, pool).tolist()
    drain(program)
    emulator.emulator_fail_runs(ctypes.c_int64(0))  # the device dies; CUDA then calls nobody back
    program.start(batch, pool, *tables(1))
    wait_for_step(program)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        program.collect()
    emulator.emulator_reset()
    assert program.run_greedy(batch, pool).tolist() == wanted
