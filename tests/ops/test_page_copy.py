"""Copies between pages and host memory: what is moved, that nothing else is touched, and what is refused (R16, R18,
R38).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.ops import allocate_pool, copy_pages, page_bytes
from pyserve.ops import reference_attention as reference
from pyserve.ops.stream import combs_of
from tests.ops.paged import ints

NUM_PAGES = 24


def random_pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits: NaN of every kind among them, which a copy must not change (R38)."""
    pool = allocate_pool(NUM_PAGES, 2, 2, 4, 8, dtype)
    bits = pool.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2)))
    return pool


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@given(
    pages=st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=NUM_PAGES, unique=True),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(pages: list[int], dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    host, wanted_host = (torch.full((len(pages) * page_bytes(pool),), 9, dtype=torch.uint8) for _ in range(2))
    copy_pages(pool, host, pages, to_host=True)
    reference.page_copy(pool, wanted_host, pages, to_host=True)
    assert torch.equal(host, wanted_host)

    target, wanted = allocate_pool(NUM_PAGES, 2, 2, 4, 8, dtype), allocate_pool(NUM_PAGES, 2, 2, 4, 8, dtype)
    copy_pages(target, host, pages, to_host=False)
    reference.page_copy(wanted, host, pages, to_host=False)
    assert torch.equal(bits(target), bits(wanted))


@pytest.mark.parametrize(
    ("combs", "pages"),
    [
        ([[3, 2, 5, 3, 0]], [3, 4, 8, 9, 13, 14]),
        ([[9, 1, -1, 4, 0]], [9, 8, 7, 6]),
        ([[20, 2, -4, 3, 0]], [20, 21, 16, 17, 12, 13]),
        ([[5, 1, 1, 1, 2], [0, 2, 2, 1, 0]], [0, 1, 5]),
        ([[0, 24, 24, 1, 0]], list(range(24))),
    ],
)
def test_combs(combs: list[list[int]], pages: list[int]) -> None:
    pool = random_pool()
    host, wanted = (torch.zeros(len(pages) * page_bytes(pool), dtype=torch.uint8) for _ in range(2))
    copy_pages(pool, host, ints(combs), to_host=True)
    reference.page_copy(pool, wanted, pages, to_host=True)
    assert torch.equal(host, wanted)


def test_a_list_becomes_one_comb_a_run() -> None:
    assert combs_of([4, 5, 6, 2, 9, 10]).tolist() == [[4, 3, 3, 1, 0], [2, 1, 1, 1, 3], [9, 2, 2, 1, 4]]


def test_a_larger_host_buffer_keeps_its_rest() -> None:
    pool = random_pool()
    host = torch.full((3 * page_bytes(pool),), 9, dtype=torch.uint8)
    copy_pages(pool, host, ints([[7, 1, 1, 1, 1]]), to_host=True)
    size = page_bytes(pool)
    assert (host[:size] == 9).all()
    assert torch.equal(host[size : 2 * size], bits(pool[7]))
    assert (host[2 * size :] == 9).all()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([], "a copy of zero pages"),
        ([[0, 0, 1, 1, 0]], "a copy of zero pages"),
        ([[0, 1, 1, 0, 0]], "a copy of zero pages"),
        ([24], "pages 24..24 are not all in the pool of 24"),
        ([-1], "pages -1..-1 are not all in the pool"),
        ([[22, 3, 3, 1, 0]], "pages 22..24 are not all in the pool"),
        ([[2, 1, -1, 4, 0]], "pages -1..2 are not all in the pool"),
        ([[0, 1, 2147483647, 2, 0]], "are not all in the pool"),
        ([[0, 4, 4, 1, 1]], "needs pages 1..4 of host, which holds 4"),
        ([[0, 1, 1, 1, -1]], "needs pages -1..-1 of host"),
        ([0, 1, 2, 3, 4], "needs pages 4..4 of host, which holds 4|needs pages 0..4 of host, which holds 4"),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_what_does_not_fit_is_refused_whole(pages: list[int] | list[list[int]], message: str, to_host: bool) -> None:
    """The last comb is bad, the first is good: nothing may have moved (R18)."""
    pool = random_pool()
    host = torch.full((4 * page_bytes(pool),), 9, dtype=torch.uint8)
    before = bits(pool).clone()
    combs = (
        torch.cat(
            [
                ints([[1, 1, 1, 1, 0]]),
                combs_of(ints(pages).reshape(-1, 5) if pages and isinstance(pages[0], list) else ints(pages)),
            ]
        )
        if pages
        else ints(pages)
    )
    with pytest.raises(ValueError, match=message):
        copy_pages(pool, host, combs, to_host)
    assert (host == 9).all()
    assert torch.equal(bits(pool), before)


def test_what_is_wrong_is_named() -> None:
    pool, host = random_pool(), torch.zeros(100000, dtype=torch.uint8)
    for change, message in [
        ((pool.transpose(0, 1), host, [0]), "pool must be contiguous"),
        ((pool, host.float(), [0]), "host must be Byte, not Float"),
        ((pool, host[::2], [0]), "host must be contiguous"),
        ((pool, host, torch.zeros(1, 4, dtype=torch.int32)), r"combs int32 \[m, 5\], not torch.int32 \[1, 4\]"),
        ((pool, host, torch.zeros(5, 4, dtype=torch.int32)), r"combs int32 \[m, 5\], not torch.int32 \[5, 4\]"),
        ((pool, host, torch.zeros(1, 5)), "combs must be Int, not Float"),
        ((pool, host, torch.zeros(3)), "pages must be int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            copy_pages(*change, to_host=True)


def test_pool_sizes_are_checked() -> None:
    assert allocate_pool(3, 2, 4, 16, 64, torch.bfloat16).shape == (3, 2, 2, 4, 16, 64)
    with pytest.raises(ValueError, match="at least 1"):
        allocate_pool(0, 2, 4, 16, 64, torch.float32)
    with pytest.raises(ValueError, match="dtype must be"):
        allocate_pool(1, 2, 4, 16, 64, torch.float64)
    with pytest.raises(MemoryError, match="does not fit in memory"):
        allocate_pool(1 << 40, 64, 64, 16, 128, torch.float32)
