"""The copy engine: every way gives the same bytes, only what was asked for is touched, nothing is posted that does not
fit, and the way is chosen by number and size (R13, R15, R18, R38).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.cuda.build import CSRC, POLICIES
from tests.cuda.device import AUTOMATIC, BATCHED, CALLS, KERNEL, CudaFailed, Device, comb_table, page_hashes

PAGE = 4096 + 32  # not a whole number of blocks' strides
LISTS = {
    "one": [5],
    "adjacent": list(range(3, 11)),
    "comb": [0, 1, 6, 7, 12, 13, 18, 19],
    "single pages apart": [2, 5, 8, 11],
    "downwards": [9, 8, 7, 6],
    "backward comb": [20, 21, 14, 15, 8, 9],
    "mixed": [4, 5, 6, 22, 1, 2, 17, 16, 15, 9],
}
SCATTERED = [0, 2, 5, 9, 14, 20, 3, 1, 15, 11]
WAYS = {"automatic": AUTOMATIC, "calls": CALLS, "batched": BATCHED, "kernel": KERNEL}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("pages", LISTS.values(), ids=LISTS.keys())
def test_round_trip(device: Device, pages: list[int], way: int) -> None:
    pool, host, stream = device.pool(24, PAGE), device.host(len(pages), PAGE), device.stream()
    before, table = pool.copy(), comb_table(pages)
    device.copy(pool, host, table, stream, to_host=True, way=way)
    device.synchronize(stream)
    assert (host == before[pages]).all()
    assert (pool == before).all()
    host[:] ^= 0x5A
    device.copy(pool, host, table, stream, to_host=False, way=way)
    device.synchronize(stream)
    others = [page for page in range(24) if page not in pages]
    assert (pool[pages] == before[pages] ^ 0x5A).all()
    assert (pool[others] == before[others]).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_bytes", [16, 48, 4096, 4096 * 5 + 16])
def test_the_kernel_moves_every_byte_whatever_the_schedule(device: Device, policy: int, page_bytes: int) -> None:
    rng = np.random.default_rng(policy)
    pages = rng.permutation(90)[:70].tolist()  # more pages than blocks
    pool, host, stream = device.pool(90, page_bytes), device.host(70, page_bytes), device.stream()
    hashes = device.memory(np.zeros(70, np.uint64), is_pinned=False)
    device.library.configure(policy, seed=3)
    device.copy(pool, host, comb_table(pages), stream, to_host=True, way=KERNEL)
    device.hash(pool, comb_table(pages), hashes, stream)
    device.synchronize(stream)
    assert (host == pool[pages]).all()
    assert (hashes == page_hashes(pool[pages])).all()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to pool"])
def test_hashes_are_of_what_was_copied(device: Device, way: int, to_host: bool) -> None:
    pages = [7, 3, 4, 5, 20, 12]
    pool, host, stream = device.pool(24, PAGE), device.host(6, PAGE), device.stream()
    host[:] = np.random.default_rng(1).integers(0, 256, host.shape)
    hashes = device.memory(np.zeros(6, np.uint64), is_pinned=False)
    device.copy(pool, host, comb_table(pages), stream, to_host=to_host, way=way, hashes=hashes)
    device.synchronize(stream)
    assert (host == pool[pages]).all()
    assert (hashes == page_hashes(host)).all()
    assert len(set(hashes.tolist())) == 6


def barrier_lines() -> list[int]:
    lines = (CSRC / "page_move.cuh").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if "__syncthreads()" in line]


@pytest.mark.parametrize("line", barrier_lines())
def test_no_barrier_is_there_in_vain(device: Device, line: int) -> None:
    """Without it some schedule gives a wrong hash."""
    pages = list(range(0, 200, 2))  # several a block
    pool, stream = device.pool(200, 4096), device.stream()
    hashes = device.memory(np.zeros(100, np.uint64), is_pinned=False)
    device.library.skip("page_move.cuh", line)
    wrong = 0
    for policy in POLICIES:
        device.library.configure(policy, seed=1)
        device.hash(pool, comb_table(pages), hashes, stream)
        device.synchronize(stream)
        wrong += not (hashes == page_hashes(pool[pages])).all()
    device.library.skip("", 0)
    assert wrong > 0


def test_the_whole_hash_is_right_with_every_barrier_in_place(device: Device) -> None:
    pages = list(range(0, 200, 2))
    pool, stream = device.pool(200, 4096), device.stream()
    hashes = device.memory(np.zeros(100, np.uint64), is_pinned=False)
    for policy in POLICIES:
        device.library.configure(policy, seed=1)
        device.hash(pool, comb_table(pages), hashes, stream)
        device.synchronize(stream)
        assert (hashes == page_hashes(pool[pages])).all()


def test_a_hash_notices_two_words_that_changed_places() -> None:
    page = np.arange(64, dtype=np.uint8).reshape(1, 64)
    swapped = np.concatenate([page[:, 8:16], page[:, :8], page[:, 16:]], axis=1)
    assert page_hashes(page) != page_hashes(swapped)


@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to pool"])
def test_staged_copies_reuse_the_staging_memory_in_order(device: Device, to_host: bool) -> None:
    """Three pages of staging for ten: each part must have left before the next is put there."""
    pages = LISTS["mixed"]
    pool, host, stream = device.pool(24, PAGE), device.host(10, PAGE), device.stream()
    host[:] = np.random.default_rng(1).integers(0, 256, host.shape)
    staging = device.pool(3, PAGE)
    hashes = device.memory(np.zeros(10, np.uint64), is_pinned=False)
    device.so.emulator_slow_copies(300)
    device.copy(pool, host, comb_table(pages), stream, to_host=to_host, way=KERNEL, staging=staging, hashes=hashes)
    device.synchronize(stream)
    assert (host == pool[pages]).all()
    assert (hashes == page_hashes(host)).all()


def test_a_list_with_gaps_is_staged_range_by_range(device: Device) -> None:
    """Host pages that no comb names stay as they are."""
    table = np.array([[4, 1, 1, 1, 5], [9, 2, 2, 1, 0]], np.int32)
    pool, host, stream = device.pool(12, PAGE), device.host(6, PAGE), device.stream()
    device.copy(pool, host, table, stream, to_host=True, way=KERNEL, staging=device.pool(4, PAGE))
    device.synchronize(stream)
    assert (host[5] == pool[4]).all()
    assert (host[:2] == pool[9:11]).all()
    assert not host[2:5].any()


@pytest.mark.parametrize(
    ("pages", "num_calls"),
    [
        (list(range(8)), 1),
        ([0, 1, 6, 7, 12, 13], 1),  # one 2-D call for the comb
        ([0, 1, 6, 7, 20], 2),
        ([3, 2, 1], 3),
    ],
)
def test_one_call_for_each_comb(device: Device, pages: list[int], num_calls: int) -> None:
    pool, host, stream = device.pool(24, PAGE), device.host(len(pages), PAGE), device.stream()
    before = device.num_calls()
    device.copy(pool, host, comb_table(pages), stream, to_host=True, way=CALLS)
    assert device.num_calls() - before == num_calls
    device.synchronize(stream)


@pytest.mark.parametrize("pages", [list(range(20)), [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]], ids=["contiguous", "2-D"])
def test_no_call_is_larger_than_a_chunk(device: Device, pages: list[int]) -> None:
    """Another stream's small copy finds a gap: 4 pages a call."""
    pool, host, stream = device.pool(24, PAGE), device.host(len(pages), PAGE), device.stream()
    before = device.num_calls()
    device.copy(pool, host, comb_table(pages), stream, to_host=True, way=CALLS, chunk_bytes=4 * PAGE)
    assert device.num_calls() - before == -(-len(pages) // 4)
    device.synchronize(stream)
    assert (host == pool[pages]).all()


@pytest.mark.parametrize(("way", "counter"), [(BATCHED, "copy_calls"), (KERNEL, "launches")], ids=["batch", "launch"])
def test_no_batch_and_no_launch_is_larger_than_a_chunk(device: Device, way: int, counter: str) -> None:
    """However small its pieces are: 4 pages a call; and one that has room takes them all."""
    pool, host, stream = device.pool(24, PAGE), device.host(len(SCATTERED), PAGE), device.stream()
    count = getattr(device.so, f"emulator_num_{counter}")
    count.restype = ctypes.c_int64
    for chunk_pages, num_calls in ((4, 3), (10, 1)):
        before = count()
        table, chunk_bytes = comb_table(SCATTERED), chunk_pages * PAGE
        device.copy(pool, host, table, stream, to_host=True, way=way, chunk_bytes=chunk_bytes)
        assert count() - before == num_calls
        device.synchronize(stream)
        assert (host == pool[SCATTERED]).all()


def test_a_page_larger_than_a_chunk_is_cut(device: Device) -> None:
    pages = [4, 6, 8, 1]
    pool, host, stream = device.pool(10, PAGE), device.host(4, PAGE), device.stream()
    before = device.num_calls()
    device.copy(pool, host, comb_table(pages), stream, to_host=True, way=CALLS, chunk_bytes=1000)
    assert device.num_calls() - before == 4 * 5
    device.synchronize(stream)
    assert (host == pool[pages]).all()


@pytest.mark.parametrize(
    ("pages", "options", "driver", "way"),
    [
        (list(range(20)), {}, 13000, CALLS),
        (SCATTERED, {}, 13000, CALLS),  # few enough
        (SCATTERED, {"max_calls": 4}, 13000, KERNEL),  # pieces too small for a batch
        (SCATTERED, {"max_calls": 4, "min_batch_bytes": PAGE}, 13000, BATCHED),
        (SCATTERED, {"max_calls": 4, "min_batch_bytes": PAGE}, 12040, KERNEL),  # a driver without
    ],
)
def test_the_way_is_chosen(device: Device, pages: list[int], options: dict[str, int], driver: int, way: int) -> None:
    pool, host = device.pool(24, PAGE), device.host(len(pages), PAGE)
    device.so.emulator_set_driver_version(driver)
    assert device.way(pool, host, comb_table(pages), **options) == way


@pytest.mark.parametrize(("driver", "way"), [(13000, BATCHED), (12040, CALLS)])
def test_odd_page_sizes_do_without_the_kernel(device: Device, driver: int, way: int) -> None:
    device.so.emulator_set_driver_version(driver)
    pool, host, stream = device.pool(24, 1000), device.host(10, 1000), device.stream()
    table = comb_table(SCATTERED)
    assert device.way(pool, host, table, max_calls=4) == way
    device.copy(pool, host, table, stream, to_host=True, max_calls=4)
    device.synchronize(stream)
    assert (host == pool[SCATTERED]).all()
    with pytest.raises(CudaFailed, match="16 bytes at a time") as refused:
        device.copy(pool, host, table, stream, to_host=True, way=KERNEL)
    assert refused.value.code == 1


def test_a_missing_batched_copy_is_refused_not_replaced(device: Device) -> None:
    device.so.emulator_set_driver_version(12040)
    assert device.so.pyserve_cuda_can_batch() == 0
    pool, host = device.pool(24, PAGE), device.host(1, PAGE)
    with pytest.raises(CudaFailed, match="no batched copy"):
        device.copy(pool, host, comb_table([1]), device.stream(), to_host=True, way=BATCHED)


@pytest.mark.parametrize(("pool_bytes", "driver"), [(4 << 20, 13000), (4 << 20, 12040), (64 << 10, 13000)])
def test_calibration(device: Device, pool_bytes: int, driver: int) -> None:
    """Whatever it measures here, it keeps to its bounds, touches the host buffer alone, and its tuning works."""
    device.so.emulator_set_driver_version(driver)
    pool, host, stream = device.pool(pool_bytes // 4096, 4096), device.host(512, 4096), device.stream()
    before = pool.copy()
    tuning = device.calibrate(pool, host, stream)
    assert (pool == before).all()
    assert 4 <= tuning.max_calls <= 64
    assert 4 << 20 <= tuning.chunk_bytes <= 64 << 20
    assert tuning.chunk_bytes % (1 << 20) == 0
    assert tuning.min_batch_bytes >= 4096
    if driver < 12080:
        assert tuning.min_batch_bytes == 2**63 - 1
    chosen = {name: getattr(tuning, name) for name, _ in tuning._fields_}
    device.copy(pool, host[:10], comb_table([*SCATTERED[:5], 12, 4, 8, 6, 13]), stream, to_host=True, **chosen)
    device.synchronize(stream)
    assert (host[:10] == pool[[*SCATTERED[:5], 12, 4, 8, 6, 13]]).all()


def test_slow_calls_are_taken_less_often(device: Device) -> None:
    """Each copy takes a millisecond more here; the kernel does not, so only large pieces go by the copy engines."""
    pool, host, stream = device.pool(1024, 4096), device.host(512, 4096), device.stream()
    device.so.emulator_slow_copies(1000)
    assert device.calibrate(pool, host, stream).min_batch_bytes > 4096


def test_calibration_needs_some_memory(device: Device) -> None:
    pool, host = device.pool(2, 4096), device.host(1, 4096)
    with pytest.raises(CudaFailed) as refused:
        device.calibrate(pool, host, device.stream())
    assert refused.value.code == 1


BAD_TABLES = {
    "nothing": ([], "zero pages"),
    "no pages in a run": ([[0, 0, 1, 1, 0]], "zero pages"),
    "past the pool": ([[22, 3, 3, 1, 0]], r"pages 22\.\.24 are not all in the pool of 24"),
    "below the pool": ([[2, 1, -1, 4, 0]], r"pages -1\.\.2 are not all"),
    "past the host": ([[0, 2, 4, 4, 1]], r"needs pages 1\.\.8 of host, which holds 8"),
    "before the host": ([[0, 1, 1, 1, -1]], "of host"),
    "second comb bad": ([[0, 4, 4, 1, 0], [23, 2, 2, 1, 4]], r"combs\[1\]"),
    "product overflows 32 bits": ([[0, 2**16, 2**16, 2**16, 0]], "not all in the pool"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("rows", "message"), BAD_TABLES.values(), ids=BAD_TABLES.keys())
def test_what_does_not_fit_is_refused_and_nothing_is_posted(
    device: Device, rows: list[list[int]], message: str, way: int
) -> None:
    pool, host, stream = device.pool(24, 64), device.host(8, 64), device.stream()
    before, calls = pool.copy(), device.num_calls()
    for to_host in (True, False):
        with pytest.raises(CudaFailed, match=message) as refused:
            device.copy(pool, host, np.array(rows, np.int32).reshape(-1, 5), stream, to_host=to_host, way=way)
        assert refused.value.code == 1
    assert device.num_calls() == calls
    assert device.so.emulator_num_outstanding() == 0
    assert (pool == before).all()
    assert not host.any()
    assert device.so.cudaPeekAtLastError() == 0


def test_a_copy_that_cannot_be_posted_is_an_error_and_leaves_none_behind(device: Device) -> None:
    pool, host, stream = device.pool(24, PAGE), device.host(3, PAGE), device.stream()
    device.so.emulator_fail_posts(1)
    with pytest.raises(CudaFailed) as failed:
        device.copy(pool, host, comb_table([1, 5, 9]), stream, to_host=True, way=CALLS, chunk_bytes=PAGE)
    assert failed.value.code != 1
    assert device.so.cudaPeekAtLastError() == 0
    device.synchronize(stream)


def test_a_failed_copy_keeps_an_error_that_was_pending(device: Device) -> None:
    pool, host = device.pool(24, PAGE), device.host(3, PAGE)
    device.so.emulator_set_last_error(2)
    device.copy(pool, host, comb_table([1, 5, 9]), device.stream(), to_host=True)
    assert device.so.cudaPeekAtLastError() == 2


def test_the_comb_table_may_go_away_at_once(device: Device) -> None:
    pool, host, stream = device.pool(24, PAGE), device.host(10, PAGE), device.stream()
    for way in (CALLS, BATCHED, KERNEL):
        host[:] = 0
        with device.paused():
            table = comb_table(SCATTERED)
            device.copy(pool, host, table, stream, to_host=True, way=way)
            table[:] = -1
        device.synchronize(stream)
        assert (host == pool[SCATTERED]).all()


def test_pinned_copies_do_not_block_and_pageable_ones_do(device: Device) -> None:
    pool, stream = device.pool(24, PAGE), device.stream()
    pinned, pageable = device.host(2, PAGE), device.host(2, PAGE, is_pinned=False)
    with device.paused():
        device.copy(pool, pinned, comb_table([4, 5]), stream, to_host=True)
        assert not device.query(device.recorded(stream))
        assert not pinned.any()
    device.synchronize(stream)
    blocked = device.so.emulator_num_blocking_copies()
    device.copy(pool, pageable, comb_table([4, 5]), stream, to_host=True)
    assert device.so.emulator_num_blocking_copies() == blocked + 1
    assert (pageable == pool[4:6]).all()
