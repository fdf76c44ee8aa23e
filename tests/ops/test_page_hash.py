"""Hashes of pages: what they are, and that the copy back notices whatever changed in between (R23b)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.ops import CopyStream, PageMismatch, allocate_pool, page_bytes
from tests.ops.paged import ints

ODD = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def reference_hash(data: bytes) -> int:
    """The same hash in plain integers."""
    lanes = [ODD * (2 * i + 1) & MASK for i in range(8)]
    padded = data + bytes(-len(data) % 64)
    for start in range(0, len(padded), 64):
        for i in range(8):
            word = int.from_bytes(padded[start + 8 * i : start + 8 * i + 8], "little")
            product = (lanes[i] ^ word) * ODD & MASK
            lanes[i] = (product << 29 | product >> 35) & MASK
    result = len(data) * ODD & MASK
    for lane in lanes:
        result = (result ^ lane) * ODD & MASK
        result ^= result >> 32
    return result or 1


def random_pool(num_pages: int, head_dim: int) -> torch.Tensor:
    pool = allocate_pool(num_pages, 1, 1, 4, head_dim, torch.float16)
    bits = pool.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return pool


def copy_out(stream: CopyStream, pool: torch.Tensor, pages: list[int], hashes: torch.Tensor) -> torch.Tensor:
    host = torch.zeros(len(pages) * page_bytes(pool), dtype=torch.uint8)
    assert stream.copy_pages(pool, host, pages, to_host=True, hashes=hashes).wait(5)
    return host


@pytest.mark.parametrize("head_dim", [1, 5, 8, 300])  # 16 bytes, 80, one stripe and more, more than one piece
def test_hashes_are_those_of_the_reference(head_dim: int) -> None:
    stream, pool = CopyStream(), random_pool(6, head_dim)
    hashes = torch.tensor([1, 0, 1, 1])
    host = copy_out(stream, pool, [4, 5, 0, 2], hashes)
    size = page_bytes(pool)
    wanted = [reference_hash(host[i * size : (i + 1) * size].numpy().tobytes()) for i in range(4)]
    assert [value & MASK for value in hashes.tolist()] == [wanted[0], 0, wanted[2], wanted[3]]
    assert torch.equal(host[:size], pool[4].reshape(-1).view(torch.uint8))
    assert torch.equal(host[size : 2 * size], pool[5].reshape(-1).view(torch.uint8)), "copied without a hash"
    stream.close()


@pytest.mark.parametrize("head_dim", [1, 5, 8, 300])
def test_a_page_has_the_same_hash_in_host_memory_and_keeps_one_that_it_has(head_dim: int) -> None:
    stream, pool = CopyStream(), random_pool(4, head_dim)
    copied = torch.ones(4, dtype=torch.int64)
    host = copy_out(stream, pool, [3, 1, 0, 2], copied)
    hashes = torch.tensor([0, 77, 0, 0])
    stream.hash_pages(host, hashes)
    assert hashes.tolist() == [copied[0], 77, *copied[2:]]
    with pytest.raises(ValueError, match="host must have"):
        stream.hash_pages(host[1:], hashes)
    stream.close()


@given(bit=st.integers(0, 3 * 80 * 8 - 1))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_noticed_and_named(bit: int) -> None:
    stream, pool = CopyStream(), random_pool(3, 5)
    hashes = torch.ones(3, dtype=torch.int64)
    host = copy_out(stream, pool, [0, 1, 2], hashes)
    assert stream.copy_pages(pool, host, [2, 0, 1], to_host=False, hashes=hashes).wait(5)
    host[bit // 8] ^= 1 << bit % 8
    event = stream.copy_pages(pool, host, [0, 1, 2], to_host=False, hashes=hashes)
    with pytest.raises(PageMismatch, match=f"page {bit // (8 * page_bytes(pool))} of the parked state"):
        event.wait(5)
    with pytest.raises(PageMismatch):
        event.query()
    stream.close()


def test_large_copies_hash_and_copy_as_small_ones_do() -> None:
    """Past one MiB lines are written past the caches; a page of these ends within a line."""
    stream, pool = CopyStream(), random_pool(70, 1027)
    size = page_bytes(pool)
    assert 70 * size > 1 << 20 and size % 64
    hashes = torch.ones(70, dtype=torch.int64)
    hashes[5] = 0
    pages = [*range(35, 70), *range(35)]
    host = copy_out(stream, pool, pages, hashes)
    assert torch.equal(host.reshape(70, size), pool[pages].view(torch.uint8).reshape(70, size))
    for place in (0, 34, 69):
        assert hashes[place].item() & MASK == reference_hash(host[place * size : (place + 1) * size].numpy().tobytes())
    assert hashes[5] == 0
    before = pool.clone()
    pool.zero_()
    assert stream.copy_pages(pool, host, pages, to_host=False, hashes=hashes).wait(5)
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))
    host[69 * size + size - 1] ^= 128
    with pytest.raises(PageMismatch, match="page 69 of the parked state"):
        stream.copy_pages(pool, host, pages, to_host=False, hashes=hashes).wait(5)
    stream.close()


@pytest.mark.parametrize("is_hashed", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_large_copies_of_pages_that_begin_anywhere(is_hashed: bool, step: int) -> None:
    pool = allocate_pool(120_000, 1, 1, 1, 5, torch.float16)  # pages of 20 bytes
    bits = pool.view(torch.uint8).reshape(120_000, 20)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
    stream, pages = CopyStream(), torch.arange(1, 120_000, step, dtype=torch.int32)
    hashes = torch.ones(len(pages), dtype=torch.int64) if is_hashed else None
    host = torch.zeros(len(pages) * 20, dtype=torch.uint8)
    before = bits.clone()
    assert stream.copy_pages(pool, host, pages, to_host=True, hashes=hashes).wait(5)
    assert torch.equal(host.reshape(-1, 20), before[pages.long()])
    bits[pages.long()] = 0
    assert stream.copy_pages(pool, host, pages, to_host=False, hashes=hashes).wait(5)
    assert torch.equal(bits, before)
    stream.close()


def test_pages_without_a_hash_are_not_checked() -> None:
    stream, pool = CopyStream(), random_pool(3, 8)
    hashes = torch.tensor([0, 1, 0])
    host = copy_out(stream, pool, [0, 1, 2], hashes)
    host[0] ^= 1
    event = stream.copy_pages(pool, host, [0, 1, 2], to_host=False, hashes=hashes)
    assert event.wait(5)
    assert pool.reshape(-1).view(torch.uint8)[0] == host[0]
    stream.close()


def test_places_in_the_host_buffer_count_not_places_in_the_copy() -> None:
    stream, pool = CopyStream(), random_pool(6, 8)
    hashes = torch.ones(4, dtype=torch.int64)
    host = torch.zeros(4 * page_bytes(pool), dtype=torch.uint8)
    assert stream.copy_pages(pool, host, ints([[5, 1, 1, 1, 3]]), to_host=True, hashes=hashes).wait(5)
    assert hashes[:3].tolist() == [1, 1, 1] and hashes[3] != 1
    assert stream.copy_pages(pool, host, ints([[0, 1, 1, 1, 3]]), to_host=False, hashes=hashes).wait(5)
    assert torch.equal(pool[0].view(torch.uint8), pool[5].view(torch.uint8))
    stream.close()


def test_too_few_hashes_are_refused_and_nothing_is_posted() -> None:
    stream, pool = CopyStream(), random_pool(3, 8)
    host = torch.zeros(3 * page_bytes(pool), dtype=torch.uint8)
    with pytest.raises(ValueError, match="hashes must have one value for each of the 3 pages of host, not 2"):
        stream.copy_pages(pool, host, [0], to_host=True, hashes=torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="hashes must be Long"):
        stream.copy_pages(pool, host, [0], to_host=True, hashes=torch.ones(3))
    assert stream.num_outstanding() == 0
    stream.close()


def test_a_copy_says_how_long_it_took() -> None:
    stream, pool = CopyStream(delay_ms=50), random_pool(3, 8)
    host = torch.zeros(3 * page_bytes(pool), dtype=torch.uint8)
    event = stream.copy_pages(pool, host, [0, 1, 2], to_host=True)
    assert event.copy_s == 0.0
    assert event.wait(5)
    assert 0.0 < event.copy_s < 0.05, "the time before it began does not count"
    stream.close()
