"""Attention of one layer: a decode row at 4096 positions, and a prompt of 512, beside the memory and arithmetic that
each needs.

    make bench, or: python -m pytest bench/test_attention_speed.py -s

SmolLM2-135M's shape: 9 heads, 3 kv heads, 64 dimensions, pages of 16 in random order. Thirty layers are read in turn,
as in a step, so that no cache holds the keys. One thread.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import pyserve.ops as ops
from bench.limits import memory_read_gb_s

NUM_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 9, 3, 64, 16, 30


def inputs(
    context_len: int, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """qkv of the last `num_rows` positions of one sequence, the pool, and positions, sequences, page table."""
    torch.manual_seed(1)
    num_pages = context_len // PAGE_SIZE
    kv = ops.allocate_pool(num_pages, LAYERS, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype)
    kv.normal_()
    qkv = torch.randn(num_rows, (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    positions = torch.arange(context_len - num_rows, context_len, dtype=torch.int32)
    pages = torch.randperm(num_pages, dtype=torch.int32)[None].contiguous()
    return qkv, kv, [positions, torch.zeros(num_rows, dtype=torch.int32), pages]


def every_layer(qkv: torch.Tensor, kv: torch.Tensor, rows: list[torch.Tensor], num_layers: int = LAYERS) -> None:
    for layer in range(num_layers):
        torch.ops.pyserve.attention(qkv, NUM_HEADS, kv, layer, HEAD_DIM**-0.5, 0.0, 0, *rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
def test_decode_at_4096(benchmark: Any, dtype: torch.dtype) -> None:
    qkv, kv, rows = inputs(4096, 1, dtype)
    benchmark.pedantic(every_layer, args=(qkv, kv, rows), warmup_rounds=2, rounds=30)
    num_bytes = kv.numel() * kv.element_size()
    rate, limit = num_bytes / benchmark.stats.stats.median / 1e9, memory_read_gb_s(1)
    share = f"{100 * rate / limit:.0f} % of the {limit:.1f} that one thread can read"
    print(f"\n{num_bytes / 1e6:.0f} MB of KV a step, {rate:.1f} GB/s: {share}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
def test_prompt_of_512(benchmark: Any, dtype: torch.dtype) -> None:
    qkv, kv, rows = inputs(512, 512, dtype)
    benchmark.pedantic(every_layer, args=(qkv, kv, rows, 5), warmup_rounds=1, rounds=10)
    multiplications = 5 * 2 * NUM_HEADS * HEAD_DIM * 512 * 513 / 2
    rate = 2 * multiplications / benchmark.stats.stats.median / 1e9
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    limit = matmul_gflops(left, right)
    print(f"\n{rate:.0f} GFLOP/s: {100 * rate / limit:.0f} % of torch's float matrix product, {limit:.0f}")


def matmul_gflops(left: torch.Tensor, right: torch.Tensor) -> float:
    """torch's own product on one thread: what the machine's arithmetic can be expected to give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * left.shape[0] ** 3 / min(seconds) / 1e9
