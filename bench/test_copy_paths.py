"""Page copies between pool and host memory, beside one plain memcpy of as many bytes.

    make bench, or: python -m pytest bench/test_copy_paths.py -s

A sequence of 2000 tokens of a 4B model (36 layers, 8 kv heads, 128 dimensions, f16), in the orders that matter: all
pages adjacent, the comb of four sequences that grew side by side, no order at all, and page by page, a call for each.
Then the same bytes gathered from, and scattered to, pieces of 2 KiB to 2 MiB. memcpy is libc's, measured in turn with
the copy, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyserve.ops as ops
from pyserve.ops.stream import combs_of

NUM_PAGES, PAGE_SIZE = 125, 16
ROUNDS = 15
ORDERS: dict[str, Callable[[], list[int]]] = {
    "adjacent": lambda: list(range(NUM_PAGES)),
    "comb": lambda: list(range(1, 4 * NUM_PAGES, 4)),
    "scattered": lambda: random.Random(1).sample(range(4 * NUM_PAGES), NUM_PAGES),
}
DIRECTIONS = pytest.mark.parametrize("to_host", [True, False], ids=["park", "restore"])
FRAGMENT_TOTAL = 64 << 20


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    return ops.allocate_pool(4 * NUM_PAGES, 36, 8, PAGE_SIZE, 128, torch.float16).fill_(1.0)


@DIRECTIONS
@pytest.mark.parametrize("verify", ["off", "sample", "all"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_copy(benchmark: Any, pool: torch.Tensor, order: str, verify: str, to_host: bool) -> None:
    host = torch.ones(NUM_PAGES * ops.page_bytes(pool), dtype=torch.uint8)
    compare(benchmark, pool, host, combs_of(ORDERS[order]()), to_host, verify)


@DIRECTIONS
def test_page_by_page(benchmark: Any, pool: torch.Tensor, to_host: bool) -> None:
    size = ops.page_bytes(pool)
    host = torch.ones(NUM_PAGES * size, dtype=torch.uint8)
    calls = [(host[place * size : (place + 1) * size], combs_of([page]))
             for place, page in enumerate(ORDERS["scattered"]())]  # fmt: skip

    def copy() -> None:
        for piece, combs in calls:
            ops.copy_pages(pool, piece, combs, to_host)

    report(benchmark, copy, host, NUM_PAGES)


@DIRECTIONS
@pytest.mark.parametrize("fragment_kib", [2, 8, 32, 128, 512, 2048])
def test_fragments(benchmark: Any, fragment_kib: int, to_host: bool) -> None:
    """Pieces that do not coalesce: on the CPU, a row of copies; on a GPU, one kernel launch."""
    count = FRAGMENT_TOTAL // (fragment_kib << 10)
    fragments = ops.allocate_pool(2 * count, 1, 1, 1, fragment_kib << 8, torch.float16).fill_(1.0)
    pages = random.Random(1).sample(range(2 * count), count)
    host = torch.ones(FRAGMENT_TOTAL, dtype=torch.uint8)
    compare(benchmark, fragments, host, combs_of(pages), to_host, "off")


def test_posting_costs_the_loop(benchmark: Any, pool: torch.Tensor) -> None:
    """What the engine's loop pays for a park: the call that posts it, with the list of its pages."""
    host = torch.ones(NUM_PAGES * ops.page_bytes(pool), dtype=torch.uint8)
    stream, pages = ops.CopyStream(), ORDERS["comb"]()
    benchmark.pedantic(lambda: stream.copy_pages(pool, host, pages, True), warmup_rounds=1, rounds=ROUNDS)
    stream.close()


def compare(
    benchmark: Any, pool: torch.Tensor, host: torch.Tensor, combs: torch.Tensor, to_host: bool, verify: str
) -> None:
    """The copy through a stream, which can hash, beside memcpy."""
    stream = ops.CopyStream()
    hashes = None
    if verify != "off":
        hashes = torch.zeros(host.numel() // ops.page_bytes(pool), dtype=torch.int64)
        hashes[:: 1 if verify == "all" else 8] = 1
        stream.copy_pages(pool, host, combs, True, hashes=hashes).wait()
    report(benchmark, lambda: stream.copy_pages(pool, host, combs, to_host, hashes=hashes).wait(), host, len(combs))
    stream.close()


def report(benchmark: Any, copy: Callable[[], object], host: torch.Tensor, num_pieces: int) -> None:
    target = torch.ones_like(host)
    plain_s: list[float] = []

    def beside() -> None:
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), host.data_ptr(), host.numel())
        plain_s.append(time.perf_counter() - started)

    benchmark.pedantic(copy, setup=beside, warmup_rounds=1, rounds=ROUNDS)
    rate, limit = (host.numel() / s / 1e9 for s in (benchmark.stats.stats.median, statistics.median(plain_s)))
    benchmark.extra_info.update(gb_s=rate, memcpy_gb_s=limit, share=rate / limit)
    share = f"{100 * rate / limit:.0f} % of memcpy's {limit:.1f}"
    print(f"\n{host.numel() >> 20} MiB in {num_pieces} pieces, {rate:.1f} GB/s: {share}")
