"""Norm, activation, quantisation, rope and KV write, argmax: emulated, against float64, in every schedule (R37)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyserve.ops import BROKEN_ROW, reference_linear
from tests.cuda.attention_case import BF16, F16, F32, HALF_UNIT, call, to_float
from tests.cuda.build import POLICIES, EmulatorError, Library
from tests.cuda.row_cases import (
    GELU_TANH,
    SILU,
    SOURCES,
    RopeCase,
    Rows,
    gated_activation,
    normal,
    quantise,
    rms_norm,
    untouched,
)
from tests.cuda.sample_cases import argmax


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*SOURCES)


def assert_quantised(rows: Rows) -> None:
    """The int8 half is what the reference makes of the float half, bit for bit."""
    q8, scale, total = reference_linear.quantise(torch.from_numpy(rows.f32))
    np.testing.assert_array_equal(rows.q8, q8.numpy())
    np.testing.assert_array_equal(rows.scale, scale.numpy())
    np.testing.assert_array_equal(rows.sum, total.numpy())


@pytest.mark.parametrize("policy", POLICIES)
def test_quantise_is_the_reference_bit_for_bit(library: Library, policy: int) -> None:
    library.configure(policy)
    x = normal(1, 9, 96) * np.logspace(-35, 30, 9, dtype=np.float32)[:, None]
    x[3, 5], x[4, 40], x[5, 64:] = np.inf, np.nan, 0
    x[6, :32] = np.arange(-16, 16) / 2.0 + 0.25  # ties once scaled
    assert_quantised(quantise(library, x))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("width", [1, 33, 256, 576])
def test_rms_norm(library: Library, policy: int, has_residual: bool, width: int) -> None:
    library.configure(policy)
    x, residual = normal(1, 3, width), normal(2, 3, width) if has_residual else None
    total = x + residual if residual is not None else x
    out, want = rms_norm(library, x, residual)
    np.testing.assert_allclose(out.f32, want, rtol=2e-6, atol=1e-6)
    if residual is not None:
        np.testing.assert_array_equal(residual, total)
    with_q8, _ = rms_norm(library, x, None, has_q8=True) if width % 32 == 0 else (None, None)
    if with_q8 is not None:
        assert_quantised(with_q8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
@pytest.mark.parametrize("width", [1, 48, 288])
def test_gated_activation(library: Library, policy: int, kind: int, width: int) -> None:
    library.configure(policy)
    gate_up = normal(3, 3, 2 * width) * 3
    gate_up[0, 0] = -100.0  # its exponential is beyond float
    out, want = gated_activation(library, gate_up, kind)
    np.testing.assert_allclose(out.f32, want, rtol=3e-6, atol=3e-6)
    if width % 32 == 0:
        assert_quantised(gated_activation(library, gate_up, kind, has_q8=True)[0])


def test_rows_are_the_same_alone_and_in_company(library: Library) -> None:
    x, gate_up = normal(1, 5, 288), normal(2, 5, 192)
    together = [rms_norm(library, x)[0].f32, gated_activation(library, gate_up, SILU)[0].f32, quantise(library, x).q8]
    for row in range(5):
        one, two = x[row : row + 1].copy(), gate_up[row : row + 1].copy()
        alone = [rms_norm(library, one)[0].f32, gated_activation(library, two, SILU)[0].f32, quantise(library, one).q8]
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[0], b[row])


@pytest.mark.parametrize("policy", POLICIES)
def test_argmax_takes_the_lower_of_equal_ids_and_nothing_of_a_broken_row(library: Library, policy: int) -> None:
    library.configure(policy)
    logits = np.round(normal(4, 12, 1100))
    logits[1, [3, 700, 1099]] = 50
    logits[2, 1099], logits[3, 0] = 50, 50
    logits[4, :] = np.nan
    logits[5, :], logits[5, 2] = -np.inf, np.nan
    logits[6, :600], logits[6, 650] = np.nan, np.inf
    logits[7, 1099], logits[8, 0] = np.nan, -np.float32(np.nan)
    logits[9, 5], logits[10, :] = np.inf, -np.inf
    logits[11, :], logits[11, 1098] = -np.inf, -7
    want = logits.argmax(1)
    want[1:12] = [3, 1099, 0, *[BROKEN_ROW] * 7, 1098]
    np.testing.assert_array_equal(argmax(library, logits), want)


def test_argmax_of_a_row_longer_than_its_vocabulary(library: Library) -> None:
    logits = normal(4, 2, 20)
    logits[:, 17:] = 99
    np.testing.assert_array_equal(argmax(library, logits, 17), logits[:, :17].argmax(1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("pool_type", "page_size"), [(F32, 16), (F16, 1), (BF16, 24)])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "has_norm"), [(64, 64, False), (80, 32, True), (256, 256, True)])
def test_rope_and_kv_write(
    library: Library,
    policy: int,
    is_interleaved: bool,
    pool_type: int,
    page_size: int,
    head_dim: int,
    rotary_dim: int,
    has_norm: bool,
) -> None:
    library.configure(policy)
    case = RopeCase(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        page_size=page_size,
        pool_type=pool_type,
        is_interleaved=is_interleaved,
        has_norm=has_norm,
    )
    qkv, pool = case.run(library)
    q, kv = case.wanted()
    np.testing.assert_allclose(qkv[:, : case.num_heads], q, rtol=1e-6, atol=3e-6)
    np.testing.assert_array_equal(qkv[:, case.num_heads :], case.qkv[:, case.num_heads :])  # k and v stay in qkv
    cells = to_float(case.cells(pool), pool_type)
    np.testing.assert_allclose(cells, kv, rtol=HALF_UNIT[pool_type] + 1e-6, atol=3e-6)
    np.testing.assert_array_equal(case.cells(pool)[:, 1], case.rounded(case.qkv[:, -1]))  # v: one rounding
    assert untouched(pool, case)


def test_a_row_of_rope_alone_and_in_company(library: Library) -> None:
    rows = [(0, 0), (0, 1), (1, 33), (2, 17)]
    together = RopeCase(has_norm=True)
    qkv, pool = together.run(library)
    for i, row in enumerate(rows):
        alone = RopeCase(has_norm=True, rows=[row])
        qkv_alone, pool_alone = alone.run(library)
        np.testing.assert_array_equal(qkv_alone[0], qkv[i])
        np.testing.assert_array_equal(alone.cells(pool_alone)[0], together.cells(pool)[i])


def test_what_cannot_be_done_is_refused(library: Library) -> None:
    x = normal(1, 2, 48)
    with pytest.raises(EmulatorError):
        rms_norm(library, x, has_q8=True)  # 48 columns are no whole blocks
    with pytest.raises(EmulatorError):
        gated_activation(library, x, 7)
    with pytest.raises(EmulatorError):
        RopeCase(head_dim=264).run(library)
    with pytest.raises(EmulatorError):
        call(library, "pyserve_cuda_argmax", x, 40, 48, 2, np.zeros(2, np.int32))
