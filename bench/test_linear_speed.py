"""All linear weights of the demo model times M rows, beside what the machine can do.

    make bench, or: python -m pytest bench/test_linear_speed.py -s

The model is SmolLM2-135M: Q4_1 layers, Q8_0 head. A step here is its products, gated activations and norms, without
attention. The head sees every row up to 16 rows (decoding), one row above (a prompt).
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import pyserve.ops as ops
from bench.limits import int8_gmac_s, memory_read_gb_s
from pyserve.ops.weights import TYPE_NAMES, PackedWeight, file_bytes, pack

THREADS = min(2, os.cpu_count() or 1)
LAYERS, HIDDEN, FFN, KV, VOCAB = 30, 576, 1536, 192, 49152
MAX_ROWS = 512


def random_weight(name: str, rows: int, cols: int) -> PackedWeight:
    raw = torch.randint(0, 256, (file_bytes(name, rows, cols),), dtype=torch.uint8).reshape(-1, file_bytes(name, 1, 32))
    raw[:, : 4 if name == "Q4_1" else 2] = 0x10  # f16 scales of ordinary size
    return pack(name, raw, rows, cols)


@pytest.fixture(scope="module")
def step() -> tuple[ops.Program, int, int]:
    """(program, bytes of the layers' weights, bytes of the head's)"""
    program = ops.Program(max_tokens=MAX_ROWS, max_samples=16, num_threads=THREADS)
    x, normed, taken, act = (program.buffer(width) for width in (HIDDEN, HIDDEN, HIDDEN, FFN))
    qkv, gate_up, logits = (program.buffer(width) for width in (HIDDEN + 2 * KV, 2 * FFN, VOCAB))
    head = random_weight("Q8_0", VOCAB, HIDDEN)
    layer_bytes = 0
    program.embed(head, x)
    for _ in range(LAYERS):
        q, k, v, o, gate, up = (random_weight("Q4_1", rows, HIDDEN) for rows in (HIDDEN, KV, KV, HIDDEN, FFN, FFN))
        down = random_weight("Q4_1", HIDDEN, FFN)
        layer_bytes += sum(weight.data.numel() for weight in (q, k, v, o, gate, up, down))
        program.rms_norm(x, torch.ones(HIDDEN), 1e-5, normed)
        program.linear(normed, [q, k, v], qkv)
        program.linear(normed, [o], x, accumulate=True)
        program.linear(normed, [gate, up], gate_up)
        program.gated_activation(gate_up, act)
        program.linear(act, [down], x, accumulate=True)
    program.take_rows(x, taken)
    program.linear(taken, [head], logits)
    program.set_logits(logits)
    return program, layer_bytes, head.data.numel()


@pytest.fixture(scope="module")
def limits() -> tuple[float, float]:
    """(GB/s read, int8 GMAC/s) of THREADS threads together"""
    return memory_read_gb_s(THREADS, 1 << 28), int8_gmac_s() * THREADS


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64, 512])
def test_all_weights(
    benchmark: Any, step: tuple[ops.Program, int, int], limits: tuple[float, float], num_rows: int
) -> None:
    program, layer_bytes, head_bytes = step
    num_samples = num_rows if num_rows <= 16 else 1
    rows = torch.arange(num_rows, dtype=torch.int32)
    batch = ops.StepBatch(
        rows, rows, torch.zeros_like(rows), torch.zeros(1, MAX_ROWS, dtype=torch.int32), rows[:num_samples].clone()
    )
    kv = ops.allocate_pool(1, 1, 1, 16, 8, torch.float32)
    benchmark.pedantic(program.run, args=(batch, kv), rounds=5 if num_rows > 64 else 20, warmup_rounds=2)
    seconds = benchmark.stats.stats.median
    layer_macs = LAYERS * (2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * FFN * HIDDEN)
    gmacs = (layer_macs * num_rows + VOCAB * HIDDEN * num_samples) / seconds / 1e9
    gb_s = (layer_bytes + head_bytes) / seconds / 1e9
    benchmark.extra_info.update(gb_s=gb_s, gmac_s=gmacs, limit_gb_s=limits[0], limit_gmac_s=limits[1])
    print(
        f"\nM={num_rows:3d} {THREADS} threads {seconds * 1e3:7.2f} ms"
        f"  {gb_s:5.1f} GB/s ({gb_s / limits[0]:.0%} of {limits[0]:.1f})"
        f"  {gmacs:6.1f} GMAC/s ({gmacs / limits[1]:.0%} of {limits[1]:.0f})"
    )


@pytest.mark.parametrize("name", [name for name in TYPE_NAMES if name not in ("F32", "F16", "BF16")])
def test_packing(benchmark: Any, name: str) -> None:
    """One thread; a model's load uses all. Beside it a plain copy, which no load can beat."""
    raw = torch.randint(0, 256, (file_bytes(name, 4096, 4096),), dtype=torch.uint8)
    benchmark.pedantic(pack, args=(name, raw, 4096, 4096), rounds=5, warmup_rounds=1)
    copied, started = torch.empty_like(raw).zero_(), time.perf_counter()
    copied.copy_(raw)
    copy_gb_s = len(raw) / (time.perf_counter() - started) / 1e9
    gb_s = len(raw) / benchmark.stats.stats.min / 1e9
    benchmark.extra_info.update(gb_s=gb_s, copy_gb_s=copy_gb_s)
    print(f"\n{name} packed at {gb_s:.2f} GB/s of the file; a copy {copy_gb_s:.1f} GB/s")
