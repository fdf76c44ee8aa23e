"""The engine on the CUDA backend, every kernel run from its source by the emulator (R17, R18, R23b, R36-R38).

A chat gives the same tokens and log-probabilities alone and in company, parked and restored, asynchronously and not:
bit for bit on one device. Against the CPU's kernels logits are close, not equal: sums are made in another order.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.errors import SettingsError
from pyserve.kv_store import KvStore
from pyserve.models.load import Model, load
from pyserve.ops import Device, PageMismatch, StepBatch
from pyserve.ops.cuda import CudaProgram
from pyserve.ops.weights import TYPE_NAMES
from pyserve.park import Parking
from pyserve.serving import start_engine
from pyserve.settings import Settings
from pyserve.types import SamplingParams, SequenceRequest
from tests.cuda.conftest import DEVICE, IS_EMULATED, finish_torch
from tests.engine.parked import round_trip, sequence_of
from tests.engine.workload import Outcome, assert_clean, request, run
from tests.ops.weight_cases import random_matrix
from tools.make_tiny_model import make_gguf

SIZES = {"hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 64}
LIMITS = {"max_tokens": 64, "max_samples": 64, "max_positions": 256, "num_threads": 1}
FULL_POOL = {"ctx_size": 128, "parallel": 4, "kv_type": "f16", "verify_parks": "all"}  # 8 pages for chats of 3 to 5
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.0, num_logprobs=1),
    SamplingParams(temperature=0.7, repeat_penalty=1.3),
)


@pytest.fixture
def device(opened: Device) -> Device:
    return opened


def tiny(folder: Path, type_name: str) -> Path:
    path: Path = make_gguf(folder / f"{type_name}.gguf", type=type_name, seed=5, **SIZES)
    return path


@pytest.fixture(scope="module")
def model(opened: Device, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tiny(tmp_path_factory.mktemp("model"), "Q8_0"), device=opened, **LIMITS)


# --- one step


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = ints([[3, 4, 7, 0], [9, 1, 2, 0], [11, 12, 13, 14]])
STEPS = (
    StepBatch(ints([*range(5, 45)]), ints([*range(20), *range(20)]), ints([0] * 20 + [1] * 20), TABLE, ints([19, 39])),
    StepBatch(ints([50, 51]), ints([20, 20]), ints([0, 1]), TABLE, ints([0, 1])),
    StepBatch(ints([7, 50, 51, 6, 8, 9]), ints([0, 21, 21, 1, 2, 3]), ints([2, 0, 1, 2, 2, 2]), TABLE, ints([1, 2, 5])),
    StepBatch(ints([50, 7, 8, 51]), ints([22, 4, 5, 22]), ints([0, 2, 2, 1]), TABLE, ints([])),
)


# Activations of quantised products are int8: a sum that differs in its last bit can be rounded to the next step.
@pytest.mark.parametrize(
    ("type_name", "tolerance"),
    [("F32", 4e-3), ("BF16", 4e-3), ("Q8_0", 0.15), ("Q4_0", 0.15), ("Q4_1", 0.15), ("Q5_0", 0.15)],
)
def test_logits_are_near_the_cpus(device: Device, tmp_path: Path, type_name: str, tolerance: float) -> None:
    path = tiny(tmp_path, type_name)
    here, there = load(path, **LIMITS), load(path, device=device, **LIMITS)
    pools = [each.allocate_pool(16, 2, 1, 16, 64, torch.float16) for each in (here.device, there.device)]
    for step in STEPS:
        wanted, got = here.program.run(step, pools[0]), there.program.run(step, pools[1])
        assert got.shape == wanted.shape
        assert not got.numel() or (got - wanted).abs().max() < tolerance
        assert there.program.run_greedy(step, pools[1]).tolist() == got.argmax(1).tolist()  # type: ignore[attr-defined]


def product_of_rows(device: Device, name: str) -> torch.Tensor:
    """float32 [2, 32]: two rows of a matrix times all of it"""
    raw, _ = random_matrix(name, 32, 256)
    program = device.program(max_tokens=2, max_samples=2, num_threads=1)
    weight = device.pack(name, raw.numpy(), 32, 256)
    embedded, taken, out = program.buffer(256), program.buffer(256), program.buffer(32)
    program.embed(weight, embedded)
    program.take_rows(embedded, taken)
    program.linear(taken, [weight], out)
    program.set_logits(out)
    batch = StepBatch(ints([31, 4]), ints([0, 1]), ints([0, 0]), TABLE, ints([1, 0]))
    return program.run(batch, device.allocate_pool(16, 1, 1, 16, 64, torch.float16)).clone()


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_every_type_of_weight_is_embedded_and_multiplied(device: Device, name: str) -> None:
    wanted, got = product_of_rows(ops.open_device("cpu"), name), product_of_rows(device, name)
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()


# --- four chats on a full pool


def chats() -> list[SequenceRequest]:
    return [request(seed, 14 + 7 * seed, 30, sampling=sampling) for seed, sampling in enumerate(SAMPLINGS)]


def seen(outcome: Outcome) -> object:
    assert outcome.error is None
    assert outcome.finished is not None
    return outcome.tokens, outcome.logprobs


@pytest.fixture(scope="module")
def alone(model: Model) -> list[object]:
    """What each chat says when nobody else is there."""
    roomy = {**FULL_POOL, "ctx_size": 256, "parallel": 1}
    return [seen(run(model, [[chat]], **roomy).outcomes[0]) for chat in chats()]


@pytest.mark.parametrize("is_async", [True, False])
def test_four_chats_on_a_full_pool_say_what_they_say_alone(model: Model, alone: list[object], is_async: bool) -> None:
    assert isinstance(model.program, CudaProgram)
    together = run(model, [[chat] for chat in chats()], preempt_async=is_async, **FULL_POOL)
    assert [seen(outcome) for outcome in together.outcomes] == alone
    assert together.preempts == together.resumes > 0
    assert together.counters.parked_bytes > 0
    assert (together.counters.hash_mismatches, together.counters.copies_failed) == (0, 0)
    num_graphs, num_failed, _ = model.program.graph_counts()
    assert (num_graphs > 0, num_failed) == (True, 0)
    assert_clean(together)


def test_where_memory_cannot_be_pinned_parking_goes_on_and_says_so_once(
    model: Model, alone: list[object], emulator: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.emulator_refuse_pins(1)
    infos = []
    with caplog.at_level(logging.WARNING, "pyserve.park"):
        together = run(model, [[chat] for chat in chats()], prepare=lambda each: infos.append(each.info), **FULL_POOL)
    assert [seen(outcome) for outcome in together.outcomes] == alone
    assert together.preempts == together.resumes > 0
    assert together.counters.parked_bytes > 0
    assert not infos[0].is_pinned
    assert sum("parks and restores are slower" in record.getMessage() for record in caplog.records) == 1
    assert_clean(together)


# --- the steady state


def test_a_thousand_cycles_pin_allocate_and_wait_for_nothing(device: Device, emulator: ctypes.CDLL) -> None:
    """A counter over the runtime's calls stands still from the second round of every sequence on."""
    emulator.emulator_num_slow_calls.restype = ctypes.c_int64
    emulator.emulator_num_blocking_copies.restype = ctypes.c_int64
    kv = KvStore(num_pages=32, num_layers=1, num_kv_heads=1, page_size=4, head_dim=8, kv_type="f16", device=device)
    parking = Parking(kv, budget_bytes=1 << 20, verify="sample")
    sequences = [sequence_of(5 + 4 * number, id=number) for number in range(4)]  # 2, 3, 4 and 5 pages
    places = [list(range(8 * number, 8 * number + number + 2)) for number in range(4)]
    parking.prepare(20)
    gc.collect()  # what other tests left behind is given up now, not meanwhile
    counts: list[tuple[int, int, int]] = []
    for number in range(1000 + 8):
        sequence, pages = sequences[number % 4], places[number % 4]
        round_trip(parking, kv, sequence, pages, pages)
        if number % 3 == 0:
            parking.discard([sequence])
        calls = emulator.emulator_num_slow_calls(), emulator.emulator_num_blocking_copies()
        counts.append((*calls, parking.arena.num_allocations))
    assert counts[0][0] > 0, "the counter counts"
    assert counts[7] == counts[-1]
    parking.discard(sequences)
    parking.close()


# --- copies, and what is refused


@contextmanager
def paused(emulator: ctypes.CDLL) -> Iterator[None]:
    """Work that has not started waits until the end of the block, or ten seconds, lest who waits for it hangs."""
    goes_on = threading.Timer(10, emulator.emulator_pause, [0])
    emulator.emulator_pause(1)
    goes_on.start()
    try:
        yield
    finally:
        goes_on.cancel()
        emulator.emulator_pause(0)


@pytest.mark.parametrize("can_pin", [True, False])
def test_a_page_that_changed_while_it_was_parked_is_noticed(
    device: Device, emulator: ctypes.CDLL, can_pin: bool
) -> None:
    pool, stream = device.allocate_pool(8, 2, 1, 16, 64, torch.float16), device.copy_stream()
    pool.copy_(torch.arange(pool.numel(), dtype=torch.float32).reshape(pool.shape) % 251)
    page_bytes = ops.page_bytes(pool)
    finish_torch()
    host = torch.zeros(4 * page_bytes, dtype=torch.uint8)
    if can_pin:
        host = device.pinned(host)
    else:
        emulator.emulator_refuse_pins(1)  # the memory for the hashes
    hashes = torch.tensor([1, 0, 1, 0])
    pages = [5, 1, 2, 7]
    assert stream.copy_pages(pool, host, pages, True, hashes=hashes).wait(10)
    wanted = pool[pages].clone()
    assert hashes[1] == hashes[3] == 0
    found = torch.zeros(4, dtype=torch.int64)
    stream.hash_pages(host, found)
    assert (found[0], found[2]) == (hashes[0], hashes[2]), "the host finds what the device does"
    hashes = found
    pool.zero_()
    finish_torch()
    assert stream.copy_pages(pool, host, [0, 3, 4, 6], False, hashes=hashes).wait(10)
    assert torch.equal(pool[[0, 3, 4, 6]], wanted)
    assert pool[[1, 2, 5, 7]].count_nonzero() == 0
    host[2 * page_bytes + 9] ^= 4
    event = stream.copy_pages(pool, host, [0, 3, 4, 6], False, hashes=hashes)
    with pytest.raises(PageMismatch, match="page 2"):
        event.wait(10)
    host[2 * page_bytes + 9] ^= 4
    host[page_bytes + 9] ^= 4
    with pytest.raises(PageMismatch, match="page 1"):
        stream.copy_pages(pool, host, [0, 3, 4, 6], False, hashes=hashes).wait(10)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.copy_pages(pool, host, pages, True)


def test_a_weight_type_that_is_not_there_is_named(device: Device) -> None:
    with pytest.raises(ValueError, match="there is no weight type 99"):
        torch.ops.pyserve_cuda.pack(99, torch.zeros(4, dtype=torch.uint8), 1, 1)


def test_a_copy_in_flight_is_not_done_and_one_that_does_not_fit_is_refused(
    device: Device, emulator: ctypes.CDLL
) -> None:
    pool, stream = device.allocate_pool(4, 1, 1, 16, 64, torch.float16), device.copy_stream()
    host = device.pinned(torch.zeros(4 * ops.page_bytes(pool), dtype=torch.uint8))
    with paused(emulator):
        event = stream.copy_pages(pool, host, [2, 0], True)
        assert not event.query()
        assert stream.num_outstanding() == 1
        time.sleep(0.11)
    assert event.wait(30)
    assert event.copy_s > 0.1
    with pytest.raises(ValueError, match="not all in the pool"):
        stream.copy_pages(pool, host, [4], True)
    assert stream.num_outstanding() == 0
    stream.close()


def test_copies_of_memory_that_is_not_pinned_keep_nobody_waiting(device: Device, emulator: ctypes.CDLL) -> None:
    """R17: and what is posted behind them comes after them, pinned or not."""
    emulator.emulator_refuse_pins(1)
    pool, stream = device.allocate_pool(4, 1, 1, 16, 64, torch.float16), device.copy_stream()
    page_bytes = ops.page_bytes(pool)
    pool.copy_(torch.arange(pool.numel(), dtype=torch.float32).reshape(pool.shape) % 251)
    finish_torch()
    wanted = pool[[2, 0]].clone()
    plain, pinned = torch.zeros(2 * page_bytes, dtype=torch.uint8), torch.zeros(2 * page_bytes, dtype=torch.uint8)
    emulator.emulator_refuse_pins(0)
    pinned = device.pinned(pinned)
    hashes = torch.ones(2, dtype=torch.int64)
    with paused(emulator):
        out = stream.copy_pages(pool, plain, [2, 0], True, hashes=hashes)
        back = stream.copy_pages(pool, plain, [1, 3], False, hashes=hashes)
        last = stream.copy_pages(pool, pinned, [1, 3], True)
        assert not out.query(), "posting waited for the copy"
        assert stream.num_outstanding() == 3
        time.sleep(0.11)
    assert last.wait(30)
    assert out.query() and back.query()
    assert out.copy_s > 0.1
    assert torch.equal(pinned, wanted.view(torch.uint8).reshape(-1))
    plain[7] ^= 1
    with pytest.raises(PageMismatch, match="page 0"):
        stream.copy_pages(pool, plain, [1, 3], False, hashes=hashes).wait(10)
    with pytest.raises(ValueError, match="not all in the pool"):
        stream.copy_pages(pool, plain, [4], True)
    unfinished = stream.copy_pages(pool, plain, [1, 3], True)
    stream.close()
    assert unfinished.query()


def test_how_pages_are_copied_is_measured_at_the_start_and_said(
    device: Device, emulator: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    pool, stream = device.allocate_pool(64, 1, 1, 16, 64, torch.float16), device.copy_stream()
    pool.fill_(7)
    with caplog.at_level(logging.INFO, "pyserve.device"):
        stream.calibrate(pool)
    (said,) = caplog.messages
    assert f"up to {stream.tuning['max_calls']} runs" in said and stream.tuning["chunk_bytes"] >= 1 << 20
    assert re.fullmatch(
        r"copies of pages, measured in \d+ ms: up to \d+ runs or combs one call each; beyond, "
        r"(pieces from \d+ KiB in one batch, others|all) by a kernel; \d+ MiB at a time",
        said,
    )
    assert (pool == 7).all()
    caplog.clear()
    emulator.emulator_slow_copies(30_000)
    stream.calibrate(pool, limit_s=0.1)  # type: ignore[call-arg]
    assert caplog.messages == ["how to copy pages was not measured, and is assumed: took longer than 100 ms"]
    emulator.emulator_slow_copies(0)
    emulator.emulator_refuse_pins(1)
    stream.calibrate(pool)
    emulator.emulator_refuse_pins(0)
    assert "was not measured, and is assumed: allocating 16777216 bytes of pinned memory failed" in caplog.messages[1]
    host = device.pinned(torch.zeros(2 * ops.page_bytes(pool), dtype=torch.uint8))
    assert stream.copy_pages(pool, host, [5, 9], True).wait(10)
    stream.close()


def test_what_the_device_does_not_have_is_said_in_one_line(device: Device, model: Model) -> None:
    with pytest.raises(ValueError, match="head_dim must be 64, 80, 96, 128 or 256"):
        shape = ops.AttentionShape(0, 2, 1, 16)
        program = device.program(max_tokens=4, max_samples=4, num_threads=1)
        table = torch.zeros(8, 8)
        qkv = program.buffer(shape.qkv_width)
        program.embed(device.pack("F32", torch.zeros(4, shape.qkv_width), 4, shape.qkv_width), qkv)
        program.rope_kv_write(qkv, shape, ops.RopeTable(table, table, is_interleaved=False))
    with pytest.raises(SettingsError, match=r": this (process has the other kind|machine has no CUDA)"):
        ops.open_device("cuda:0" if IS_EMULATED else "cuda-emulated")


def test_a_model_that_the_device_cannot_run_ends_the_start_in_one_line(device: Device, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "narrow.gguf", seed=5)  # heads of 16
    starting = start_engine(Settings(device=DEVICE), path, lambda stage, fraction: None)
    with pytest.raises(SettingsError, match=f"--device {DEVICE} cannot run this model: head_dim must be 64") as failure:
        asyncio.run(starting)
    assert "\n" not in failure.value.message


def test_what_does_not_fit_on_the_device_is_said_before_anything_is_put_there(
    device: Device, emulator: ctypes.CDLL, tmp_path: Path
) -> None:
    sizes = {**SIZES, "heads": 4, "kv_heads": 4, "layers": 4, "context": 1 << 16}  # 4 KiB of KV a token
    path = make_gguf(tmp_path / "wide.gguf", type="Q8_0", seed=5, **sizes)
    before = emulator.emulator_num_blocks(0)

    def start(ctx_size: int, device_mib: int) -> str:
        emulator.emulator_set_device_bytes(ctypes.c_int64(device_mib << 20))
        settings = Settings(device=DEVICE, ctx_size=ctx_size, parallel=2, batch_size=16)
        with pytest.raises(SettingsError) as failure:
            asyncio.run(start_engine(settings, path, lambda stage, fraction: None))
        return failure.value.message

    said = start(1 << 16, 320)
    numbers = re.fullmatch(
        r"--ctx-size 65536: 256 MiB for the KV pool, (\d+) MiB of weights and (\d+) MiB to work in are more than "
        r"cuda-emulated has: (\d+) MiB of 320 MiB are free, 256 MiB of them are kept for the driver; "
        r"--ctx-size (\d+) would fit",
        said,
    )
    assert numbers is not None, said
    weights, work, free, fitting = map(int, numbers.groups())
    left = free - 256 - weights - work  # MiB, up to three rounded
    assert left * 256 - 16 <= fitting <= (left + 3) * 256
    assert emulator.emulator_num_blocks(0) <= before  # a model of another test may have gone
    assert start(1 << 16, 256).endswith("no --ctx-size fits: take a smaller model")
    assert "\n" not in said
