"""RMS norm against float64, and its int8 half against the quantisation of its own output."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyserve.ops as ops
from pyserve.ops import reference_linear as reference
from tests.ops.weight_cases import random_matrix


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out: torch.Tensor = torch.ops.pyserve.rms_norm(x, weight, eps)
    return out


@given(
    width=st.integers(1, 700), num_rows=st.integers(1, 9), exponent=st.integers(-12, 15), seed=st.integers(0, 2**32 - 1)
)
@settings(max_examples=60, deadline=None)
def test_near_the_reference(width: int, num_rows: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator) * 10.0**exponent
    weight = torch.randn(width, generator=generator)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("width", [16, 172, 576, 4096])
def test_a_row_has_the_same_bits_in_any_company(width: int) -> None:
    x, weight = torch.randn(33, width), torch.randn(width)
    together = rms_norm(x, weight, 1e-6)
    assert torch.equal(torch.cat([rms_norm(row.reshape(1, -1), weight, 1e-6) for row in x]), together)


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-5), torch.zeros(2, 64))


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    x = torch.randn(3, 96)
    clean = rms_norm(x, torch.ones(96), 1e-5)
    x[1, 5] = torch.nan
    out = rms_norm(x, torch.ones(96), 1e-5)
    assert bool(out[1].isnan().all())
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_fused_quantisation_is_the_quantisation_of_the_output(num_threads: int) -> None:
    """A program quantises in the norm; the single ops norm first and quantise inside the product. Their bits agree."""
    width, vocab = 288, 40
    table = ops.pack("F32", torch.randn(vocab, width), vocab, width)
    weight = ops.pack("Q4_1", random_matrix("Q4_1", vocab, width)[0], vocab, width)
    factors = torch.randn(width)
    program = ops.Program(max_tokens=8, max_samples=8, num_threads=num_threads)
    x, taken, normed = (program.buffer(width) for _ in range(3))
    out = program.buffer(vocab)
    program.embed(table, x)
    program.take_rows(x, taken)
    program.rms_norm(taken, factors, 1e-5, normed)
    program.linear(normed, [weight], out)
    program.set_logits(out)
    tokens = torch.tensor([3, 1, 4, 1, 39], dtype=torch.int32)
    embedded = torch.ops.pyserve.embed(tokens, table.data, table.type_id, vocab, width)
    expected = torch.ops.pyserve.linear(rms_norm(embedded, factors, 1e-5), weight.data, weight.type_id, vocab, width)
    rows = torch.arange(5, dtype=torch.int32)
    batch = ops.StepBatch(tokens, rows, torch.zeros_like(rows), torch.zeros(1, 1, dtype=torch.int32), rows)
    assert torch.equal(program.run(batch, ops.allocate_pool(1, 1, 1, 16, 8, torch.float32)), expected)
