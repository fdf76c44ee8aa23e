"""Products with packed weights against the reference in float64; a row's bits depend on nothing but the row (R37)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyserve.ops  # noqa: F401  loads the kernels
from pyserve.ops import reference_linear as reference
from pyserve.ops.weights import TYPE_NAMES, PackedWeight, pack
from tests.ops.weight_cases import FLOAT_DTYPES, QUANTISED, block_cols, random_matrix

ROUNDING = 3e-7  # of a sum in float32, as a share of the sum of the magnitudes


def linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, num_shares: int = 1
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.pyserve.linear(
        x, weight.data, weight.type_id, weight.rows, weight.cols, bias, num_shares
    )
    return out


def case(
    name: str, rows: int, cols: int, num_rows: int, seed: int = 0
) -> tuple[PackedWeight, torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed weight, its values, activations [num_rows, cols] of mixed size, bias [rows]"""
    raw, values = random_matrix(name, rows, cols, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, cols, generator=generator) * torch.randn(num_rows, 1, generator=generator).exp()
    return pack(name, raw, rows, cols), values, x, torch.randn(rows, generator=generator)


def assert_near_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    rounding: float = ROUNDING,
) -> None:
    is_quantised = name in QUANTISED
    expected = reference.linear(x, values, bias, is_quantised=is_quantised)
    magnitude = x.double().abs() @ values.abs().T + (0 if bias is None else bias.double().abs())
    assert bool(((out.double() - expected).abs() <= rounding * magnitude + 1e-30).all())


@pytest.mark.parametrize("name", TYPE_NAMES)
@pytest.mark.parametrize(("rows", "num_rows"), [(16, 1), (48, 8), (33, 21), (1, 3)])
def test_near_the_reference(name: str, rows: int, num_rows: int) -> None:
    weight, values, x, bias = case(name, rows, 768, num_rows)
    assert_near_reference(linear(x, weight, bias), x, values, bias, name)


@given(
    name=st.sampled_from(TYPE_NAMES),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 6),
    num_rows=st.integers(1, 40),
    num_shares=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_odd_shapes(name: str, rows: int, blocks: int, num_rows: int, num_shares: int, seed: int) -> None:
    cols = blocks * (block_cols(name) if name in QUANTISED else 5)
    weight, values, x, _ = case(name, rows, cols, num_rows, seed)
    assert_near_reference(linear(x, weight, num_shares=num_shares), x, values, None, name)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    weight, _, x, bias = case(name, 50, 512, 70)
    alone = torch.cat([linear(x[m : m + 1], weight, bias) for m in range(70)])
    for num_rows in range(1, 34):
        first = 33 - num_rows  # so that a row's place in its tile changes too
        assert torch.equal(
            linear(x[first : first + num_rows].contiguous(), weight, bias), alone[first : first + num_rows]
        ), num_rows
    for num_shares in (1, 2, 3, 5, 64):
        assert torch.equal(linear(x, weight, bias, num_shares), alone), num_shares


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("fill", [0, 127, 128, 255])
def test_the_largest_products_do_not_saturate(name: str, fill: int) -> None:
    raw, values = random_matrix(name, 16, 512, fill=fill)
    x = torch.full((3, 512), 5.0)  # every q8 is 127, -127, or alternates
    x[1] = -5.0
    x[2, ::2] = -5.0
    # Scale and minimum nearly cancel in a weight here, which the magnitudes of the weights do not show.
    assert_near_reference(linear(x, pack(name, raw, 16, 512)), x, values, None, name, rounding=10 * ROUNDING)


@pytest.mark.parametrize("name", TYPE_NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(name: str, bad: float) -> None:
    weight, _, x, _ = case(name, 20, 256, 5)
    clean = linear(x, weight)
    x[2, 100] = bad
    out = linear(x, weight)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 37), num_rows=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_activations_are_rounded_as_the_reference_rounds(seed: int, exponent: int, num_rows: int) -> None:
    """Weights that are the identity give back scale * q8, exactly."""
    identity = torch.zeros(64, 2, 34, dtype=torch.uint8)  # Q8_0: f16 scale 1, then 32 int8
    identity[:, :, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    rows = torch.arange(64)
    identity[rows, rows // 32, 2 + rows % 32] = 1
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    q8, scale, _ = reference.quantise(x)
    assert torch.equal(linear(x, pack("Q8_0", identity, 64, 64)), reference.dequantise(q8, scale, torch.float32))


def test_rounding_to_int8_is_to_the_nearest() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    q8, scale, total = reference.quantise(x)
    step = scale.repeat_interleave(32, -1)
    assert bool(((q8 * step - x).abs() <= step * 0.50001).all())
    assert bool((q8.unflatten(-1, (-1, 32)).abs().amax(-1) == 127).all())
    assert torch.equal(total, q8.unflatten(-1, (-1, 32)).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize(("name", "dtype"), FLOAT_DTYPES.items())
def test_one_hot_rows_read_float_weights_exactly(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(19, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(linear(torch.eye(33), pack(name, values, 19, 33)), values.float().T)
