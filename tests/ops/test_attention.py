"""Attention over pages: close to float64, and the same bits whatever the page size, the chunks, the company and the
threads (R37).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pyserve.ops  # noqa: F401
from pyserve.ops import reference_attention as reference
from tests.ops.paged import Paged, ints, random_contents

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
LOG2_E = 1 / math.log(2)


def attend(
    paged: Paged, q: torch.Tensor, rows: list[tuple[int, int]], *, num_shares: int = 1, layer: int = 1, **options: Any
) -> torch.Tensor:
    """q [T, heads, head_dim]; rows: (sequence, position) of each. K and V of the rows' own qkv are garbage: attention
    must read the pool.
    """
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = paged.pool.shape[3]
    qkv = torch.cat([q.reshape(num_tokens, -1), torch.full((num_tokens, 2 * kv_heads * head_dim), float("nan"))], dim=1)
    arguments = {"scale": head_dim**-0.5, "softcap": 0.0, "window": 0} | options
    positions, sequences = ints([position for _, position in rows]), ints([sequence for sequence, _ in rows])
    return torch.ops.pyserve.attention(
        qkv,
        num_heads,
        paged.pool,
        layer,
        arguments["scale"],
        arguments["softcap"],
        arguments["window"],
        positions,
        sequences,
        paged.page_table,
        num_shares,
    ).unflatten(1, (num_heads, head_dim))


def queries(num_tokens: int, num_heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(7))


def expected(paged: Paged, q: torch.Tensor, rows: list[tuple[int, int]], **options: Any) -> torch.Tensor:
    arguments = {"scale": q.shape[2] ** -0.5} | options
    positions, sequences = ints([position for _, position in rows]), ints([sequence for sequence, _ in rows])
    return reference.attention(q.double(), paged.pool, 1, positions, sequences, paged.page_table, **arguments)


def assert_close(
    result: torch.Tensor, paged: Paged, q: torch.Tensor, rows: list[tuple[int, int]], **options: Any
) -> None:
    """As exact as float32 can be. Where pairs of bfloat16 are multiplied: a query, scaled, is rounded to bfloat16, and
    each weight may be off by 2^-9 of itself, as may be the sum that they are divided by.
    """
    head_dim = q.shape[2]
    if not (paged.pool.dtype == torch.bfloat16 and torch.ops.pyserve.isa() == "avx512_bf16" and head_dim % 32 == 0):
        wanted = expected(paged, q, rows, **options)
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=3e-6)
        return
    unit = 1.0 if options.get("softcap") else LOG2_E  # scores are in powers of two, or of e before they are capped
    rounded = (q * torch.tensor(head_dim**-0.5 * unit)).bfloat16().float()
    wanted = expected(paged, rounded, rows, scale=1 / unit, **options)
    pool = paged.pool.clone()
    pool[:, :, 1] = pool[:, :, 1].abs()
    magnitude = expected(Paged(pool, paged.page_table, paged.keys), rounded, rows, scale=1 / unit, **options)
    excess = (result.double() - wanted).abs() - magnitude / 256
    assert float(excess.max()) < 3e-6
    plain = expected(paged, q, rows, **options)
    assert float((result.double() - plain).norm() / plain.norm()) < 4e-3


MIXED_LENS = [1, 2, 63, 64, 65, 130, 200]
MIXED_ROWS = [(i, length - 1) for i, length in enumerate(MIXED_LENS[:6])] + [
    (6, position) for position in range(150, 200)
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    [(8, 4, 8), (9, 3, 64), (4, 4, 24), (8, 1, 128), (2, 1, 256), (5, 1, 40), (64, 1, 16)],
)
def test_close_to_float64(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    paged = Paged.build(random_contents(MIXED_LENS, 2, kv_heads, head_dim), 16, dtype)
    q = queries(len(MIXED_ROWS), num_heads, head_dim)
    assert_close(attend(paged, q, MIXED_ROWS), paged, q, MIXED_ROWS)


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 7}, {"window": 64}, {"window": 100}, {"softcap": 2.0}, {"softcap": 30.0, "window": 33}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_and_softcap(dtype: torch.dtype, options: dict[str, Any]) -> None:
    paged = Paged.build(random_contents(MIXED_LENS, 2, 2, 32), 16, dtype)
    q = queries(len(MIXED_ROWS), 6, 32) * 3
    assert_close(attend(paged, q, MIXED_ROWS, **options), paged, q, MIXED_ROWS, **options)


@pytest.mark.parametrize("scale", [100.0, 1e-3])
def test_sharp_and_flat_scores(scale: float) -> None:
    paged = Paged.build(random_contents([300], 2, 1, 64), 16, torch.float32)
    q = queries(2, 2, 64)
    rows = [(0, 298), (0, 299)]
    result = attend(paged, q, rows, scale=scale)
    tolerance = (
        1e-5 if scale < 1 else 3e-3
    )  # a score of some thousands has an error of some 1e-4, which the exponential shows
    torch.testing.assert_close(result.double(), expected(paged, q, rows, scale=scale), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_for_any_page_size(dtype: torch.dtype, options: dict[str, Any]) -> None:
    contents = random_contents(MIXED_LENS, 2, 3, 64)
    q = queries(len(MIXED_ROWS), 9, 64)
    results = [
        attend(Paged.build(contents, size, dtype, seed=size), q, MIXED_ROWS, **options)
        for size in (1, 3, 16, 64, 100, 256)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 50}, {"window": 128}])
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(8, 4, 8), (9, 3, 64), (4, 4, 128), (7, 1, 48)])
@pytest.mark.parametrize("dtype", HALVES)
def test_same_bits_for_any_chunking(
    num_heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    length = 150
    paged = Paged.build(random_contents([length], 2, kv_heads, head_dim), 16, dtype)
    q = queries(length, num_heads, head_dim)
    whole = attend(paged, q, [(0, position) for position in range(length)], **options)
    for chunk in (1, 5, 16, 64, 77):
        pieces = [
            attend(
                paged,
                q[start : start + chunk],
                [(0, position) for position in range(start, min(start + chunk, length))],
                **options,
            )
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(pieces), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("num_shares", [2, 3, 7, 64])
def test_same_bits_for_any_number_of_threads(num_shares: int) -> None:
    paged = Paged.build(random_contents(MIXED_LENS, 2, 3, 32), 16, torch.bfloat16)
    q = queries(len(MIXED_ROWS), 6, 32)
    assert torch.equal(attend(paged, q, MIXED_ROWS, num_shares=num_shares), attend(paged, q, MIXED_ROWS))


@pytest.mark.parametrize("dtype", HALVES)
def test_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    paged = Paged.build(random_contents(MIXED_LENS, 2, 3, 64), 16, dtype)
    q = queries(len(MIXED_ROWS), 9, 64)
    together = attend(paged, q, MIXED_ROWS)
    for i, row in enumerate(MIXED_ROWS):
        assert torch.equal(attend(paged, q[i : i + 1], [row])[0], together[i]), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 20, 21])
def test_cells_outside_a_rows_reach_do_not_matter(window: int, dtype: torch.dtype) -> None:
    """Later cells of the same sequence and those before the window hold NaN and infinity; the results are those of a
    pool without them.
    """
    contents = random_contents([200], 2, 2, 64)
    rows = [(0, position) for position in range(100, 110)]
    q = queries(len(rows), 4, 64)
    clean = attend(Paged.build(contents, 16, dtype), q, rows, window=window)
    contents[0][:, :, :, 110:] = float("nan")
    contents[0][:, :, :, 115] = float("inf")
    if window:
        contents[0][:, :, :, : 100 - window + 1] = float("nan")
    assert torch.equal(attend(Paged.build(contents, 16, dtype), q, rows, window=window), clean)
    assert clean.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_later_rows_bad_value_stays_its_own(dtype: torch.dtype) -> None:
    """An overflow in the chunk's last token must not reach the rows before it, though one tile computes them all."""
    contents = random_contents([20], 2, 1, 32)
    contents[0][:, :, :, 19] = float("inf")
    paged = Paged.build(contents, 16, dtype)
    q = queries(20, 2, 32)
    whole = attend(paged, q, [(0, position) for position in range(20)])
    assert whole[:19].isfinite().all()
    assert torch.equal(attend(paged, q[5:6], [(0, 5)])[0], whole[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_sum_to_one(dtype: torch.dtype) -> None:
    contents = random_contents([777], 2, 1, 64)
    contents[0][:, 1] = 1.0
    result = attend(Paged.build(contents, 16, dtype), queries(1, 4, 64), [(0, 776)])
    torch.testing.assert_close(result, torch.ones_like(result), rtol=0, atol=1e-6)


BAD = [
    ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    ({"layer": 2}, "layer must be in 0..1"),
    ({"positions": ints([0, 5])}, r"page_table: position 5 needs 2 columns, not 1"),
    ({"positions": ints([1, 1])}, r"positions\[1\] is 1: must ascend"),
    ({"positions": ints([-1, 1])}, r"positions\[0\] is -1"),
    ({"sequences": ints([0, 1])}, r"sequences\[1\] is 1: must be in 0..0"),
    ({"page_table": ints([[9]])}, r"page_table: page\[0\] is 9: must be in 0..3"),
    ({"positions": torch.tensor([0, 1])}, "positions must be Int, not Long"),
    ({"qkv": torch.zeros(2, 8)}, r"qkv must be \[2, 64\]"),
    ({"window": -1}, "window must not be negative"),
    ({"softcap": -1.0}, "softcap must not be negative"),
    ({"kv": torch.zeros(4, 2, 2, 2, 4, 8, dtype=torch.float64)}, "kv must be float32, float16 or bfloat16"),
    ({"kv": torch.zeros(4, 2, 2, 2, 4, 12)}, "head_dim must be a multiple of 8"),
    ({"kv": torch.zeros(4, 2, 3, 2, 4, 8)}, r"kv must be \[pages, layers, 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "qkv": torch.zeros(2, 64),
        "num_heads": 4,
        "kv": torch.zeros(4, 2, 2, 2, 4, 8),
        "layer": 0,
        "scale": 1.0,
        "softcap": 0.0,
        "window": 0,
        "positions": ints([0, 1]),
        "sequences": ints([0, 0]),
        "page_table": ints([[3]]),
    }
    torch.ops.pyserve.attention(*good.values())
    with pytest.raises(ValueError, match=message):
        torch.ops.pyserve.attention(*(good | change).values())


def test_softmax_is_exact_in_a_known_case() -> None:
    """Two keys, scores 0 and ln 3: weights 1/4 and 3/4."""
    contents = [torch.zeros(2, 2, 1, 2, 8)]
    contents[0][:, 0, 0, 1, 0] = math.log(3.0)
    contents[0][:, 1, 0, 0, 0] = 4.0
    contents[0][:, 1, 0, 1, 1] = 4.0
    q = torch.zeros(1, 1, 8)
    q[0, 0, 0] = 1.0
    result = attend(Paged.build(contents, 1, torch.float32), q, [(0, 1)], scale=1.0)
    torch.testing.assert_close(result[0, 0, :3], torch.tensor([1.0, 3.0, 0.0]), rtol=1e-6, atol=0)


# Positions are taken in segments of 256 with sums of their own: rows that end just before, at and after a boundary, and
# some that see several.
SEGMENT_LENS = [255, 256, 257, 511, 513, 770, 1100]
SEGMENT_ROWS = [(i, length - 1) for i, length in enumerate(SEGMENT_LENS)] + [
    (6, position) for position in range(760, 790)
]
SEGMENT_ROWS.sort()


@pytest.mark.parametrize("options", [{}, {"window": 256}, {"window": 300}, {"window": 10}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_segments_are_close_to_float64(dtype: torch.dtype, options: dict[str, Any]) -> None:
    paged = Paged.build(random_contents(SEGMENT_LENS, 2, 3, 64), 16, dtype)
    q = queries(len(SEGMENT_ROWS), 9, 64)
    assert_close(attend(paged, q, SEGMENT_ROWS, **options), paged, q, SEGMENT_ROWS, **options)


@pytest.mark.parametrize("options", [{}, {"window": 256}, {"window": 300}, {"window": 10}])
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 1, 32), (2, 2, 40), (8, 2, 128)])
@pytest.mark.parametrize("dtype", HALVES)
def test_segments_have_the_same_bits_however_they_are_dealt(
    num_heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    contents = random_contents(SEGMENT_LENS, 2, kv_heads, head_dim)
    q = queries(len(SEGMENT_ROWS), num_heads, head_dim)
    paged = Paged.build(contents, 16, dtype)
    together = attend(paged, q, SEGMENT_ROWS, **options)
    for num_shares in (2, 3, 5, 64):
        assert torch.equal(attend(paged, q, SEGMENT_ROWS, num_shares=num_shares, **options), together), num_shares
    assert torch.equal(attend(Paged.build(contents, 100, dtype), q, SEGMENT_ROWS, **options), together)
    for i, row in enumerate(SEGMENT_ROWS):
        alone = attend(paged, q[i : i + 1], [row], num_shares=1 + i % 5, **options)
        assert torch.equal(alone[0], together[i]), row


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [0, 200])
def test_a_prompt_over_segments_has_the_same_bits_in_any_chunks(window: int, dtype: torch.dtype) -> None:
    length = 600
    paged = Paged.build(random_contents([length], 2, 3, 64), 16, dtype)
    q = queries(length, 9, 64)
    rows = [(0, position) for position in range(length)]
    whole = attend(paged, q, rows, window=window)
    for chunk in (1, 50, 256, 300):
        pieces = [
            attend(paged, q[start : start + chunk], rows[start : start + chunk], num_shares=2, window=window)
            for start in range(0, length, chunk)
        ]
        assert torch.equal(torch.cat(pieces), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_segment_makes_the_row_bad_and_no_other(dtype: torch.dtype) -> None:
    contents = random_contents([700], 2, 1, 32)
    contents[0][:, 0, :, 650] = float("nan")
    paged = Paged.build(contents, 16, dtype)
    q = queries(2, 2, 32)
    for num_shares in (1, 2):
        result = attend(paged, q, [(0, 640), (0, 699)], num_shares=num_shares)
        assert result[0].isfinite().all()
        assert result[1].isnan().all()
