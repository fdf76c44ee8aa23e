"""Page copies between pool and host memory, beside one plain memcpy of as many bytes.

    make bench, or: python -m pytest bench/test_copy_paths.py -s

A sequence of 2000 tokens of a 4B model (36 layers, 8 kv heads, 128 dimensions, f16), in the three orders that
matter: all pages adjacent, the comb of four sequences that grew side by side, and no order at all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyserve.ops as ops
from pyserve.ops.stream import combs_of

NUM_PAGES, PAGE_SIZE = 125, 16
ORDERS: dict[str, Callable[[], list[int]]] = {
    "adjacent": lambda: list(range(NUM_PAGES)),
    "comb": lambda: list(range(1, 4 * NUM_PAGES, 4)),
    "scattered": lambda: random.Random(1).sample(range(4 * NUM_PAGES), NUM_PAGES),
}


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    return ops.allocate_pool(4 * NUM_PAGES, 36, 8, PAGE_SIZE, 128, torch.float16).fill_(1.0)


@pytest.mark.parametrize("to_host", [True, False], ids=["park", "restore"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_copy(benchmark: Any, pool: torch.Tensor, order: str, to_host: bool) -> None:
    host = torch.ones(NUM_PAGES * ops.page_bytes(pool), dtype=torch.uint8)
    combs = combs_of(ORDERS[order]())
    benchmark.pedantic(ops.copy_pages, args=(pool, host, combs, to_host), warmup_rounds=1, rounds=15)
    rate, limit = host.numel() / benchmark.stats.stats.median / 1e9, memcpy_gb_s(host)
    share = f"{100 * rate / limit:.0f} % of memcpy's {limit:.1f}"
    print(f"\n{host.numel() >> 20} MiB in {len(combs)} runs, {rate:.1f} GB/s: {share}")


def test_posting_costs_the_loop(benchmark: Any, pool: torch.Tensor) -> None:
    """What the engine's loop pays for a park: the call that posts it, with the list of its pages."""
    host = torch.ones(NUM_PAGES * ops.page_bytes(pool), dtype=torch.uint8)
    stream, pages = ops.CopyStream(), ORDERS["comb"]()
    benchmark.pedantic(lambda: stream.copy_pages(pool, host, pages, True), warmup_rounds=1, rounds=15)
    stream.close()


def memcpy_gb_s(source: torch.Tensor) -> float:
    target = torch.ones_like(source)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return source.numel() / sorted(seconds)[3] / 1e9
