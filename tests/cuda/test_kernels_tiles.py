"""How attention's work is cut: balance over random mixes of lengths, what that costs, nothing lost or done twice."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.cuda.attention_case import Case, Device, pointer
from tests.cuda.build import Library

UNIT_LEN, GROUP_LEN = 64, 512  # of csrc/cuda/tiles.h


@pytest.fixture(scope="module")
def library() -> Library:
    loaded = Library("tiles.cu")
    loaded.so.tiles_time_us.restype = ctypes.c_double
    for name in ("shares", "wrong_workers", "wrong_quotients"):
        getattr(loaded.so, f"tiles_{name}").restype = ctypes.c_int64
    return loaded


def test_a_thousand_mixes_are_balanced(library: Library) -> None:
    """With work of at least four tiles of 512 positions a block, the busiest has at most 1.05 times the mean."""
    random, tried, worst = np.random.default_rng(0), 0, 0.0
    while tried < 1000:
        num_rows, num_pairs = int(random.integers(1, 257)), int(random.choice([1, 2, 4, 8]))
        num_blocks, warps = int(random.choice([40, 108, 132])), int(random.integers(1, 5))
        window = int(random.choice([0, 0, 0, 4096]))
        positions = np.exp(random.uniform(0, np.log(32768), num_rows)).astype(np.int32)
        places = np.zeros(num_blocks, np.int32)
        total = library.so.tiles_shares(
            *(ctypes.c_void_p(pointer(positions)), num_rows, num_pairs, window),
            *(num_blocks, warps, ctypes.c_void_p(pointer(places))),
        )
        assert places.sum() == total
        if total * UNIT_LEN < 4 * GROUP_LEN * num_blocks:
            continue
        tried += 1
        worst = max(worst, places.max() / places.mean())
    assert worst <= 1.05


def test_assignment_of_256_sequences_takes_no_time(library: Library) -> None:
    positions = np.random.default_rng(1).integers(0, 32768, 256).astype(np.int32)
    times = [library.so.tiles_time_us(ctypes.c_void_p(pointer(positions)), 256, 8, 528) for _ in range(20)]
    assert min(times) <= 100


@pytest.mark.parametrize(("num_workers", "total"), [(1, 1), (7, 3), (528, 4), (528, 4097), (396, 1_000_003), (3, 9)])
def test_every_place_has_its_worker(library: Library, num_workers: int, total: int) -> None:
    assert library.so.tiles_wrong_workers(num_workers, total) == 0


def test_division_by_any_page_size(library: Library) -> None:
    assert all(library.so.tiles_wrong_quotients(divisor) == 0 for divisor in [*range(1, 1025), 65536, 2**31 - 1])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 1), (4, 4), (14, 2)])
def test_prefill_tiles_hold_every_query_once_and_the_longest_come_first(num_heads: int, num_kv_heads: int) -> None:
    lens = [5, 300, 131]
    rows = [*((0, p) for p in range(5)), *((1, p) for p in range(200, 300)), *((2, p) for p in range(131))]
    case = Case(lens, rows, num_heads=num_heads, num_kv_heads=num_kv_heads)
    tiles = case.tiles(Library("attention_prefill.cu"), Device(132, 232448))
    group, seen, last_positions = num_heads // num_kv_heads, [], []
    for first_row, num_rows, first_query in tiles:
        queries = range(first_query, min(first_query + 128, num_rows * group))
        seen += [(first_row + query // group, query % group) for query in queries]
        last_positions.append(rows[first_row + queries[-1] // group][1])
    assert sorted(seen) == [(row, head) for row in range(len(rows)) for head in range(group)]
    assert last_positions == sorted(last_positions, reverse=True)
