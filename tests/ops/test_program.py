"""The step program: the same as its ops one by one, the same bits whatever surrounds a row (R37), and every mistake
named before anything runs.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyserve.ops import Program, pack, reference_linear
from pyserve.ops import reference_attention as reference
from tests.ops.paged import ints
from tests.ops.small_model import EPS, SmallModel, batch_of

MIXES = [("F32", "F32", "F32"), ("F16", "BF16", "F32"), ("Q8_0", "Q4_1", "Q8_0"), ("Q4_0", "F32", "Q5_1")]
TOKENS = [(i * 37 + 11) % 100 for i in range(150)]


def table(rows: list[list[int]]) -> torch.Tensor:
    return ints(rows)


def run_in_chunks(model: SmallModel, program: Program, chunks: list[int], page_size: int) -> torch.Tensor:
    """Logits of the last token of TOKENS[: sum(chunks)], on pages in descending order."""
    num_pages = -(-sum(chunks) // page_size)
    kv = model.pool(num_pages, page_size, torch.float16)
    page_table = table([list(range(num_pages - 1, -1, -1))])
    start = 0
    for chunk in chunks:
        logits = program.run(batch_of([(0, start, TOKENS[start : start + chunk])], page_table), kv)
        start += chunk
    return logits[0].clone()


@pytest.mark.parametrize("types", MIXES)
def test_same_bits_as_its_ops_one_by_one(types: tuple[str, str, str]) -> None:
    model = SmallModel(types=types, is_head_normed=True)
    pieces = [(0, 0, TOKENS[:70]), (1, 0, TOKENS[3:9]), (2, 0, TOKENS[9:10])]
    batch = batch_of(pieces, table([[0, 1], [2, -1], [3, -1]]))
    kv, other_kv = model.pool(4, 64), model.pool(4, 64)
    logits = model.program().run(batch, kv)
    assert torch.equal(logits, model.op_by_op(batch, other_kv))
    assert torch.equal(kv, other_kv)


@pytest.mark.parametrize(("head_dim", "window"), [(8, 0), (32, 5), (40, 0)])
def test_close_to_float64(head_dim: int, window: int) -> None:
    """Narrow heads too: with 8 columns, a block of 32 int8 activations spans heads."""
    model = SmallModel(head_dim=head_dim, window=window)
    length = 40
    logits = model.program().run(batch_of([(0, 0, TOKENS[:length])], table([[1, 0, 2]])), model.pool(3, 16))
    kv = model.pool(3, 16).double()
    positions, sequences = torch.arange(length), torch.zeros(length, dtype=torch.int64)
    cos, sin = model.rope.cos[:length].double(), model.rope.sin[:length].double()
    x = model.values["table"][TOKENS[:length]] * 2.0
    for i in range(model.num_layers):
        h = reference_linear.rms_norm(x, model.norm.double(), EPS)
        q, k, v = ((h @ model.values[f"{name}{i}"].T) for name in "qkv")
        k = k + model.bias
        q, k, v = (part.unflatten(1, (-1, head_dim)) for part in (q, k, v))
        q, k = (reference.rope(part, cos, sin, True) for part in (q, k))
        reference.kv_write(k, v, kv, i, positions, sequences, table([[1, 0, 2]]))
        mixed = reference.attention(
            q, kv, i, positions, sequences, table([[1, 0, 2]]), scale=head_dim**-0.5, window=window
        )
        x = x + mixed.flatten(1) @ model.values[f"o{i}"].T
        h = reference_linear.rms_norm(x, model.norm.double(), EPS)
        gate_up = torch.cat([h @ model.values[f"gate{i}"].T, h @ model.values[f"up{i}"].T], dim=1)
        x = x + reference_linear.gated_activation(gate_up) @ model.values[f"down{i}"].T
    wanted = reference_linear.rms_norm(x[-1:], model.norm.double(), EPS) @ model.values["table"].T
    torch.testing.assert_close(logits.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("types", MIXES[::2])
def test_same_bits_for_any_threads_chunks_and_pages(types: tuple[str, str, str]) -> None:
    model = SmallModel(types=types)
    programs = {num_threads: model.program(num_threads=num_threads) for num_threads in (1, 2, 3)}
    wanted = run_in_chunks(model, programs[1], [150], 16)
    for num_threads, chunks, page_size in [
        (2, [150], 16),
        (3, [150], 64),
        (1, [1] * 150, 1),
        (2, [64, 64, 22], 16),
        (3, [7] * 21 + [3], 64),
        (2, [149, 1], 150),
    ]:
        result = run_in_chunks(model, programs[num_threads], chunks, page_size)
        assert torch.equal(result, wanted), (num_threads, chunks[:3], page_size)


def test_a_long_row_shared_by_threads_has_the_same_bits() -> None:
    """Threads that share a row's positions meet in the workspace, run after run, whoever comes last."""
    model = SmallModel(types=("Q8_0", "Q8_0", "Q8_0"), num_kv_heads=1, max_positions=1300)
    pages = table([torch.randperm(82, generator=torch.Generator().manual_seed(3)).tolist()])
    results = []
    for num_threads in (1, 2, 3):
        program = model.program(num_threads=num_threads, max_tokens=1300)
        kv = model.pool(82, 16, torch.float16)
        program.run(batch_of([(0, 0, [position % 90 for position in range(1270)])], pages), kv)
        steps = [program.run(batch_of([(0, position, [7])], pages), kv).clone() for position in range(1270, 1300)]
        results.append(torch.cat(steps))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("types", MIXES[::2])
def test_same_bits_in_any_company(types: tuple[str, str, str]) -> None:
    """A prompt chunk and two decode rows together, in two orders, against each alone; what the pool's other cells
    hold is NaN.
    """
    model = SmallModel(types=types, head_dim=8, num_heads=8)
    program = model.program(num_threads=2)
    page_table = table([[7, 1, 5], [0, 3, 2], [4, 6, 8]])
    starts = {0: 30, 1: 0, 2: 17}

    def filled() -> torch.Tensor:
        kv = model.pool(9, 16).fill_(float("nan"))
        for sequence, start in starts.items():
            if start:
                program.run(batch_of([(sequence, 0, TOKENS[sequence : sequence + start])], page_table), kv)
        return kv

    pieces = [(0, 30, [5]), (1, 0, TOKENS[:33]), (2, 17, [9])]
    together = program.run(batch_of(pieces, page_table), filled()).clone()
    backwards = program.run(batch_of(pieces[::-1], page_table), filled()).clone()
    assert together.isfinite().all()
    assert torch.equal(together, backwards.flip(0))
    for i, piece in enumerate(pieces):
        assert torch.equal(program.run(batch_of([piece], page_table), filled())[0], together[i])


def test_rows_are_sampled_as_asked() -> None:
    model = SmallModel()
    program, page_table = model.program(), table([[0]])
    every = program.run(batch_of([(0, 0, TOKENS[:8])], page_table, list(range(8))), model.pool(1, 16)).clone()
    some = program.run(batch_of([(0, 0, TOKENS[:8])], page_table, [6, 2, 6]), model.pool(1, 16))
    assert torch.equal(some, every[[6, 2, 6]])
    kv = model.pool(1, 16)
    assert program.run(batch_of([(0, 0, TOKENS[:8])], page_table, []), kv).shape == (0, 100)
    assert kv.any()


def test_other_threads_run_meanwhile() -> None:
    """A step holds no GIL: a thread that sleeps a millisecond at a time goes on ticking."""
    model = SmallModel(width=512, inner=2048, num_layers=3)
    program, kv, page_table = model.program(max_tokens=300), model.pool(1, 300), table([[0]])
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    num_ticks, started = 0, time.perf_counter()
    while num_ticks < 20 and time.perf_counter() - started < 20:
        before = time.perf_counter()
        program.run(batch_of([(0, 0, TOKENS * 2)], page_table), kv)
        after = time.perf_counter()
        num_ticks += sum(before < tick < after for tick in ticks)
    is_over.set()
    thread.join()
    assert num_ticks >= 20


def test_an_idle_team_sleeps() -> None:
    model = SmallModel()
    program = model.program(num_threads=4)
    run_in_chunks(model, program, [20, 1, 1], 16)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_team_that_has_one_processor_beside_a_busy_thread_gives_the_same_bits() -> None:
    model = SmallModel()
    chunks = [20, 1, 1]
    wanted = run_in_chunks(model, model.program(num_threads=1), chunks, 16)
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            result = run_in_chunks(model, model.program(num_threads=3), chunks, 16)
        finally:
            busy.kill()
            busy.wait()
    finally:
        os.sched_setaffinity(0, processors)
    assert torch.equal(result, wanted)


def test_a_dropped_program_ends_its_threads() -> None:
    model = SmallModel()
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(3):
        run_in_chunks(model, model.program(num_threads=3), [5], 16)
    gc.collect()
    assert len(list(Path("/proc/self/task").iterdir())) <= num_threads


def test_logits_outlive_the_program() -> None:
    model = SmallModel()
    program = model.program()
    logits = program.run(batch_of([(0, 0, TOKENS[:4])], table([[0]])), model.pool(1, 16))
    wanted = logits.clone()
    del program
    gc.collect()
    assert torch.equal(logits, wanted)


def test_one_run_at_a_time() -> None:
    model = SmallModel(width=512, inner=1024)
    program, page_table = model.program(), table([[0]])
    batch = batch_of([(0, 0, TOKENS)], page_table)
    results: list[str] = []

    def run() -> None:
        kv = model.pool(1, 150)
        for _ in range(20):
            try:
                program.run(batch, kv)
                results.append("ran")
            except ValueError as error:
                results.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {"ran", "the program is running: one run at a time"}


GOOD = batch_of([(0, 0, [1, 2, 3]), (1, 5, [4])], table([[0, -1], [1, 2]]))
BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": ints([1, 2, 100, 4])}, r"tokens\[2\] is 100: must be in 0..99"),
    ({"tokens": ints([1, 2, -1, 4])}, r"tokens\[2\] is -1"),
    ({"tokens": ints([])}, "positions must have 0 values"),
    ({"tokens": torch.tensor([1, 2, 3, 4])}, "tokens must be Int, not Long"),
    ({"positions": ints([0, 1, 300, 5])}, r"positions\[2\] is 300: must be in 0..299"),
    ({"positions": ints([0, 1, 1, 5])}, r"positions\[2\] is 1: must ascend"),
    ({"positions": ints([0, 1, 2, 8])}, "page_table: position 8 needs 3 columns, not 2"),
    ({"positions": ints([0, 1, 4, 5])}, r"page_table: page\[1\] is -1"),
    ({"sequences": ints([0, 0, 0, 2])}, r"sequences\[3\] is 2: must be in 0..1"),
    ({"sequences": ints([0, 0, 0])}, "sequences must have 4 values"),
    ({"page_table": ints([[0, 0], [1, 3]])}, r"page_table: page\[1\] is 3: must be in 0..2"),
    ({"sample_rows": ints([4])}, r"sample_rows\[0\] is 4: must be in 0..3"),
    ({"sample_rows": ints([0] * 9)}, "sample_rows: their number must be in 0..8, not 9"),
    ({"sample_rows": ints([[0]])}, "sample_rows must have 1 dimensions, not 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES)
def test_a_batch_out_of_range_is_named_and_nothing_written(change: dict[str, Any], message: str) -> None:
    model = SmallModel()
    program, kv = model.program(), model.pool(3, 4)
    with pytest.raises(ValueError, match=message):
        program.run(replace(GOOD, **change), kv)
    assert not kv.any()
    program.run(GOOD, kv)
    assert kv.any()


def test_more_rows_than_the_program_has_room_for() -> None:
    model = SmallModel()
    with pytest.raises(ValueError, match=r"tokens: their number must be in 1..4, not 5"):
        model.program(max_tokens=4, max_samples=4).run(batch_of([(0, 0, TOKENS[:5])], table([[0]])), model.pool(1, 16))


def test_a_pool_of_another_model_is_refused() -> None:
    model = SmallModel()
    program = model.program()
    for kv, message in [
        (SmallModel(num_layers=1).pool(3, 4), "kv: must have 2 layers, not 1"),
        (SmallModel(head_dim=40).pool(3, 4), "kv: its head_dim must be 32, not 40"),
        (SmallModel(num_kv_heads=1).pool(3, 4), "kv: its kv heads must be 2, not 1"),
        (torch.zeros(3, 4), r"kv must be \[pages, layers, 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.run(GOOD, kv)


def test_mistakes_are_named_as_instructions_are_added() -> None:
    model = SmallModel()
    weight = model.weights["q0"]  # [128, 64]
    program = Program(max_tokens=4, max_samples=2, num_threads=1)
    x, h, wide, other = (program.buffer(width) for width in (64, 64, 256, 48))
    foreign = Program(max_tokens=4, max_samples=2, num_threads=1)
    far = [foreign.buffer(8) for _ in range(9)][-1]
    program.embed(model.weights["table"], x)
    shape, rope = model.shape(0), model.rope
    quantised = pack("Q8_0", torch.zeros(64, 34 * 2, dtype=torch.uint8), 64, 64)
    mistakes: list[tuple[Any, str]] = [
        (lambda: program.embed(model.weights["table"], other), "out: its width must be 64, not 48"),
        (lambda: program.rms_norm(h, model.norm, EPS, x), "x is read before anything wrote it"),
        (lambda: program.rms_norm(x, torch.ones(63), EPS, h), "weight: its length must be 64, not 63"),
        (lambda: program.rms_norm(x, torch.ones(64).double(), EPS, h), "weight must be Float, not Double"),
        (lambda: program.rms_norm(x, model.norm, EPS, x), "out must be another register than x"),
        (lambda: program.rms_norm(far, model.norm, EPS, h), "x is no register of this program"),
        (lambda: program.linear(x, [], h), "weights must not be empty"),
        (lambda: program.linear(x, [weight], h), "out: its width must be 128, not 64|out: its width must be 64"),
        (lambda: program.linear(x, [weight, weight], h), "out: its width must be 256"),
        (lambda: program.linear(x, [model.weights["o0"]], h), "weights: the columns of each must be 64, not 128"),
        (lambda: program.linear(x, [weight] * 2, wide, biases=[None]), "biases must be as many as weights: 2, not 1"),
        (lambda: program.linear(x, [weight] * 2, wide, biases=[torch.ones(3), None]), "bias must have 128 values"),
        (lambda: program.linear(x, [weight] * 2, wide, accumulate=True), "out is read before anything wrote it"),
        (lambda: program.rope_kv_write(x, shape, rope), "qkv: its width must be 256, not 64"),
        (lambda: program.attention(x, h, shape, scale=1.0), "qkv: its width must be 256, not 64"),
        (lambda: program.attention(x, h, replace(shape, num_heads=3), scale=1.0), "num_heads must be a multiple"),
        (lambda: program.attention(x, h, replace(shape, head_dim=260), scale=1.0), "head_dim must be a multiple of 8"),
        (lambda: program.gated_activation(x, h), "out: its width must be 32, not 64|out: its width must be 64, not 32"),
        (lambda: program.gated_activation(x, h, "relu"), "kind must be one of silu, gelu_tanh, not 'relu'"),  # type: ignore[arg-type]
        (lambda: program.set_logits(x), "logits must hold sample rows"),
        (lambda: program.run(GOOD, model.pool(3, 4)), "the program is not complete"),
        (lambda: program.buffer(0), "width must be positive"),
        (lambda: Program(max_tokens=4, max_samples=5, num_threads=1), "max_samples must be in 1..max_tokens"),
        (lambda: Program(max_tokens=4, max_samples=4, num_threads=0), "num_threads must be in 1..1024, not 0"),
    ]
    for mistake, message in mistakes:
        with pytest.raises(ValueError, match=message):
            mistake()
    program.linear(x, [quantised], h)
    program.take_rows(x, h)
    with pytest.raises(ValueError, match="x holds token rows: after take_rows only sample rows can be read"):
        program.linear(x, [weight] * 2, wide)
    with pytest.raises(ValueError, match="take_rows may come once only"):
        program.take_rows(h, x)
    program.set_logits(h)
    with pytest.raises(ValueError, match="the program is complete"):
        program.buffer(8)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_profile_is_of_the_same_step(num_threads: int) -> None:
    model = SmallModel(types=("Q4_1", "Q4_1", "Q8_0"))
    batch = batch_of([(0, 0, TOKENS[:40])], table([[0, 1, 2]]))
    kv, other_kv = model.pool(3, 16), model.pool(3, 16)
    program = model.program(num_threads=num_threads)
    program.run(batch, kv)
    started = time.perf_counter()
    profile = program.profile(batch, other_kv)
    elapsed = time.perf_counter() - started
    assert torch.equal(kv, other_kv)
    used = {kind for kind, (kernel_s, _) in profile.items() if kernel_s > 0}
    assert used == {"embed", "rms_norm", "linear", "rope_kv_write", "attention", "gated_activation", "take_rows"}
    assert 0 < sum(map(sum, profile.values())) <= elapsed * num_threads
