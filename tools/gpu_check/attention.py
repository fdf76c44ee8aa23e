"""Parts that time attention: decode against the bandwidth that this device reads with, prefill in TFLOP/s."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.cuda.attention_case import BF16, AttentionSpec, Device, Matrix, Pool, StepRows
from tools.gpu_check.machine import Machine
from tools.gpu_check.results import Goal, Result

HEAD_DIM, PAGE_SIZE = 128, 16


@dataclass
class Problem:
    """bf16, 32 query and 8 KV heads, one layer, shuffled pages; values are small random numbers."""

    machine: Machine
    num_sequences: int
    context_len: int
    num_heads: int = 32
    num_kv_heads: int = 8

    def __post_init__(self) -> None:
        machine, rng = self.machine, np.random.default_rng(0)
        self.width = -(-self.context_len // PAGE_SIZE)
        num_pages = self.num_sequences * self.width
        self.page_bytes = 2 * self.num_kv_heads * PAGE_SIZE * HEAD_DIM * 2
        self.pool_bytes = num_pages * self.page_bytes
        block = small_bf16(rng, min(self.pool_bytes, 32 << 20) // 2)
        self.pool_address = machine.allocate(self.pool_bytes)
        for start in range(0, self.pool_bytes, block.nbytes):
            machine.write(self.pool_address + start, block[: (self.pool_bytes - start) // 2])
        table = rng.permutation(num_pages).astype(np.int32).reshape(self.num_sequences, self.width)
        self.table = machine.upload(table)
        self.device = Device(machine.num_sms, machine.shared_bytes)
        self.pool = Pool(self.pool_address, BF16, num_pages, 1, self.num_kv_heads, PAGE_SIZE, HEAD_DIM)
        self.spec = AttentionSpec(self.num_heads, 0, HEAD_DIM**-0.5, 0.0, 0)

    def rows(self, sequences: np.ndarray, positions: np.ndarray) -> tuple[StepRows, Matrix, Matrix]:
        """The rows, q and the output, on the device."""
        machine, width = self.machine, self.num_heads * HEAD_DIM
        q = machine.upload(small_bf16(np.random.default_rng(1), len(positions) * width))
        out = machine.allocate(len(positions) * width * 2)
        addresses = [machine.upload(values.astype(np.int32)) for values in (positions, sequences)]
        rows = StepRows(len(positions), *addresses, self.table, self.width)
        return rows, Matrix(q, BF16, width), Matrix(out, BF16, width)


def small_bf16(rng: np.random.Generator, count: int) -> np.ndarray:
    return (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def size_of(machine: Machine, function: str, *numbers: Any) -> int:
    call = getattr(machine.so, function)
    call.restype = ctypes.c_int64
    return int(call(*(ctypes.c_int64(n) if isinstance(n, int) else n for n in numbers)))


def decode(machine: Machine) -> Result:
    """32 sequences of 4,096 tokens. The limit is reading K and V once."""
    problem = Problem(machine, 2, 160) if machine.is_dry else Problem(machine, 32, 4096)
    stream = machine.stream()
    sequences = np.arange(problem.num_sequences)
    rows, q, out = problem.rows(sequences, np.full(problem.num_sequences, problem.context_len - 1))
    numbers = (problem.num_sequences, problem.num_heads, problem.num_kv_heads, HEAD_DIM, problem.context_len, 0)
    device = ctypes.byref(problem.device)
    scratch_bytes = size_of(machine, "pyserve_cuda_attention_decode_scratch_bytes", *numbers, device)
    scratch = machine.allocate(max(scratch_bytes, 16))
    by_reference = [ctypes.byref(each) for each in (q, problem.spec, problem.pool, rows, out)]

    def run() -> None:
        arguments = (*by_reference, ctypes.c_void_p(scratch), scratch_bytes, device, stream)
        machine.call("pyserve_cuda_attention_decode", *arguments)

    us = machine.time_ms(run, stream, 1 if machine.is_dry else 30) * 1e3
    read_us = read_time_us(machine, problem.pool_address, problem.pool_bytes, stream)
    goal = Goal("decode attention, 32 x 4,096 tokens", us, "us", 130.0, True)
    share = read_us / us
    data = {"us": us, "read_us": read_us, "share_of_read_bandwidth": share, "kv_bytes": problem.pool_bytes}
    bandwidth = problem.pool_bytes / read_us / 1e3
    return Result(f"{us:.1f} us, {share:.0%} of the {bandwidth:.0f} GB/s that a plain read has", [goal], data)


def read_time_us(machine: Machine, address: int, num_bytes: int, stream: ctypes.c_void_p) -> float:
    num_blocks = 4 if machine.is_dry else machine.num_sms * 8
    sums = machine.allocate(num_blocks * 256 * 4)

    def run() -> None:
        arguments = (ctypes.c_void_p(address), num_bytes, ctypes.c_void_p(sums), num_blocks, stream)
        machine.call("gpu_check_read", *arguments)

    return machine.time_ms(run, stream, 1 if machine.is_dry else 30) * 1e3


def prefill(machine: Machine) -> Result:
    """One prompt of 8,192 tokens, causal: 4 x heads x head_dim x pairs operations."""
    length = 48 if machine.is_dry else 8192
    problem = Problem(machine, 1, length)
    stream, device = machine.stream(), ctypes.byref(problem.device)
    rows, q, out = problem.rows(np.zeros(length), np.arange(length))
    queries = machine.so.pyserve_cuda_attention_prefill_queries(ctypes.c_int64(HEAD_DIM), device)
    group = problem.num_heads // problem.num_kv_heads
    chunks, tiles = np.array([[0, length, length - 1]], np.int32), np.zeros((length * group, 3), np.int32)
    chunk_pointer, tile_pointer = (ctypes.c_void_p(array.ctypes.data) for array in (chunks, tiles))
    numbers = (chunk_pointer, 1, group, int(queries), tile_pointer, len(tiles))
    num_tiles = size_of(machine, "pyserve_cuda_attention_prefill_tiles", *numbers)
    sizes = (num_tiles, problem.num_kv_heads, HEAD_DIM, device)
    scratch_bytes = size_of(machine, "pyserve_cuda_attention_prefill_scratch_bytes", *sizes)
    scratch, on_device = machine.allocate(max(scratch_bytes, 16)), machine.upload(tiles[:num_tiles])
    by_reference = [ctypes.byref(each) for each in (q, problem.spec, problem.pool, rows, out)]

    def run() -> None:
        arguments = (ctypes.c_void_p(on_device), num_tiles, ctypes.c_void_p(scratch), scratch_bytes, device, stream)
        machine.call("pyserve_cuda_attention_prefill", *by_reference, *arguments)

    ms = machine.time_ms(run, stream, 1 if machine.is_dry else 10)
    tflops = 4 * problem.num_heads * HEAD_DIM * (length * (length + 1) / 2) / ms / 1e9
    goal = Goal("prefill attention", tflops, "TFLOP/s", 330.0, False)
    return Result(f"{tflops:.0f} TFLOP/s ({ms:.2f} ms)", [goal], {"ms": ms, "tflops": tflops, "len": length})
