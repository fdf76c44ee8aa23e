"""Rotation, head norms and the write of K and V into the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pyserve.ops  # noqa: F401
from pyserve.ops import reference_attention as reference
from tests.ops.paged import ints

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Two sequences, the first on three pages in no order; rows of the second before its last page is full.
POSITIONS, SEQUENCES = [3, 4, 5, 6, 7, 8, 0, 1], [0] * 6 + [1] * 2


def tables(num_positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(num_positions)[:, None] * torch.exp(-torch.arange(half) / 3.0)[None]
    return angles.cos().contiguous(), angles.sin().contiguous()


def random_qkv(width: int, num_rows: int = len(POSITIONS)) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(3))


def write(
    qkv: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, num_heads: int, half: int, **options: Any
) -> None:
    cos, sin = tables(20, half)
    given = {
        "q_norm": None,
        "k_norm": None,
        "is_interleaved": True,
        "num_shares": 1,
        "positions": POSITIONS,
        "sequences": SEQUENCES,
    } | options
    positions, sequences = ints(given["positions"]), ints(given["sequences"])
    norms = (given["q_norm"], given["k_norm"], 1e-6)
    rows = (positions, sequences, page_table, given["num_shares"])
    torch.ops.pyserve.rope_kv_write(qkv, num_heads, cos, sin, given["is_interleaved"], *norms, pool, 1, *rows)


def new_pool(page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    width = -(-9 // page_size)
    order = torch.randperm(2 * width + 2, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    pool = torch.full((len(order), 3, 2, kv_heads, page_size, head_dim), 7.0, dtype=dtype)
    return pool, order[: 2 * width].reshape(2, width).contiguous()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "half"), [(4, 2, 8, 4), (3, 1, 64, 32), (2, 2, 128, 16), (1, 1, 256, 128)]
)
@pytest.mark.parametrize("is_normed", [False, True])
def test_against_the_reference(
    num_heads: int, kv_heads: int, head_dim: int, half: int, is_interleaved: bool, is_normed: bool, dtype: torch.dtype
) -> None:
    qkv = random_qkv((num_heads + 2 * kv_heads) * head_dim)
    pool, page_table = new_pool(4, kv_heads, head_dim, dtype)
    generator = torch.Generator().manual_seed(4)
    q_norm, k_norm = (torch.rand(head_dim, generator=generator) + 0.5 if is_normed else None for _ in range(2))
    q, k, v = reference.split(qkv.double(), num_heads, kv_heads)
    cos, sin = (table[POSITIONS].double() for table in tables(20, half))
    q = reference.rope(reference.head_norm(q, q_norm, 1e-6), cos, sin, is_interleaved)
    k = reference.rope(reference.head_norm(k, k_norm, 1e-6), cos, sin, is_interleaved)
    wanted = pool.clone()
    reference.kv_write(k, v, wanted, 1, ints(POSITIONS), ints(SEQUENCES), page_table)

    write(qkv, pool, page_table, num_heads, half, is_interleaved=is_interleaved, q_norm=q_norm, k_norm=k_norm)
    torch.testing.assert_close(qkv[:, : num_heads * head_dim].double(), q.flatten(1), rtol=1e-5, atol=2e-6)
    ulp = {torch.float32: 1e-5, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(pool.double(), wanted.double(), rtol=ulp, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Ties, subnormals, overflow to infinity and the largest finite value: v goes to the pool without arithmetic, so
    it must be torch's conversion exactly.
    """
    special = torch.tensor(
        [
            0.0,
            -0.0,
            1e-8,
            6e-8,
            2.98e-8,
            2.9803e-8,
            3e-5,
            6.1e-5,
            65504.0,
            65519.9,
            65520.0,
            1e6,
            -1e6,
            1 + 2**-11,
            1 + 3 * 2**-11,
            3.3e38,
        ]
    )
    qkv = torch.cat([torch.zeros(1, 32), special[None]], dim=1)
    pool, page_table = new_pool(4, 1, 16, dtype)
    write(qkv, pool, page_table, 1, 8, positions=[2], sequences=[0])
    assert torch.equal(pool[page_table[0, 0], 1, 1, 0, 2].view(torch.int16), special.to(dtype).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_bits_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Random patterns of 32 bits, so small numbers, ties, infinities and NaN too; a NaN stays one."""
    bits = torch.randint(-(2**31), 2**31, (256 * 16,), generator=torch.Generator().manual_seed(11)).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), (bits & -(2**15)).view(torch.float32)]).view(-1, 16)
    pool, page_table = new_pool(4, 1, 16, dtype)
    for value in values:
        write(torch.cat([torch.zeros(32), value])[None], pool, page_table, 1, 8, positions=[2], sequences=[0])
        cell, wanted = pool[page_table[0, 0], 1, 1, 0, 2], value.to(dtype)
        assert torch.equal(cell.isnan(), wanted.isnan())
        assert torch.equal(cell.nan_to_num(1).view(torch.int16), wanted.nan_to_num(1).view(torch.int16))


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_for_any_page_size_threads_and_company(dtype: torch.dtype) -> None:
    qkv = random_qkv(8 * 32)
    results = []
    for page_size, num_shares in [(16, 1), (1, 3), (4, 64), (9, 2)]:
        pool, page_table = new_pool(page_size, 2, 32, dtype)
        rotated = qkv.clone()
        write(rotated, pool, page_table, 4, 16, num_shares=num_shares)
        page, place = reference.cells(page_table, 0, torch.arange(3, 9), page_size)
        results.append((rotated, pool[page, 1, :, :, place]))
    alone, (pool, page_table) = qkv[2:3].clone(), new_pool(16, 2, 32, dtype)
    write(alone, pool, page_table, 4, 16, positions=POSITIONS[2:3], sequences=SEQUENCES[2:3])
    assert torch.equal(alone[0], results[0][0][2])
    for rotated, cells in results:
        assert torch.equal(rotated, results[0][0])
        assert torch.equal(cells, results[0][1])


def test_nothing_else_is_written() -> None:
    pool, page_table = new_pool(4, 2, 32, torch.float32)
    write(random_qkv(8 * 32), pool, page_table, 4, 16)
    changed = (pool != 7.0).any(-1).any(3).any(2)  # [pages, layers, page_size]
    wanted = torch.zeros_like(changed)
    for position, sequence in zip(POSITIONS, SEQUENCES, strict=True):
        page, place = reference.cells(page_table, sequence, torch.tensor(position), 4)
        wanted[page, 1, place] = True
    assert torch.equal(changed, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": [20], "sequences": [0]}, r"positions\[0\] is 20: must be in 0..19"),
        ({"q_norm": torch.ones(31)}, "q_norm must have 32 values, not 31"),
        ({"half": 17}, "cos must have at most head_dim / 2 columns, not 17"),
        ({"positions": [0], "sequences": [0, 0]}, "sequences must have 1 values, as positions has, not 2"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    pool, _ = new_pool(4, 2, 32, torch.float32)
    page_table = torch.zeros(2, 9, dtype=torch.int32)
    given = {"half": 16} | options
    with pytest.raises(ValueError, match=message):
        write(random_qkv(8 * 32, len(given.get("positions", POSITIONS))), pool, page_table, 4, **given)
