"""Gated activations against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyserve.ops  # noqa: F401  loads the kernels
from pyserve.ops import reference_linear as reference

KINDS = {"silu": 0, "gelu_tanh": 1}


def gated(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    out: torch.Tensor = torch.ops.pyserve.gated_activation(gate_up, KINDS[kind])
    return out


@given(
    kind=st.sampled_from(sorted(KINDS)),
    width=st.integers(1, 200),
    num_rows=st.integers(1, 5),
    size=st.floats(0.01, 60),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_near_the_reference(kind: str, width: int, num_rows: int, size: float, seed: int) -> None:
    gate_up = torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * size
    expected = reference.gated_activation(gate_up.double(), kind)
    # e^-t: float32 rounds t, so far-off tails lose digits, and past -87 they are zero.
    tail = 1e-8 * gate_up.double().abs().chunk(2, -1)[0] * gate_up.double().abs().chunk(2, -1)[1]
    assert bool(((gated(gate_up, kind).double() - expected).abs() <= 3e-6 * expected.abs() + tail).all())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_far_values(kind: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, 3e38, -100.0, 1e-30])
    out = gated(torch.cat([gate, torch.ones_like(gate)]).reshape(1, -1), kind)[0]
    assert torch.equal(out[:3], torch.tensor([0.0, -0.0, 1e4]))
    assert float(out[4]) == 88.0
    assert bool((out[[3, 5, 7]].abs() < 1e-30).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_not_finite_input_stays_in_its_place(kind: str) -> None:
    gate_up = torch.randn(2, 2 * 48)
    clean = gated(gate_up, kind)
    gate_up[0, 3], gate_up[0, 4], gate_up[1, 48 + 7] = torch.nan, torch.inf, torch.inf
    out = gated(gate_up, kind)
    is_touched = torch.zeros(2, 48, dtype=torch.bool)
    is_touched[0, 3] = is_touched[0, 4] = is_touched[1, 7] = True
    assert bool(out[0, 3].isnan())
    assert not out[is_touched].isfinite().any()
    assert torch.equal(out[~is_touched], clean[~is_touched])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("width", [32, 50, 1536])
def test_a_row_has_the_same_bits_in_any_company(kind: str, width: int) -> None:
    gate_up = torch.randn(17, 2 * width) * 5
    assert torch.equal(torch.cat([gated(row.reshape(1, -1), kind) for row in gate_up]), gated(gate_up, kind))
