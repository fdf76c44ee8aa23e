"""Embeddings out of packed tables, rows that are picked, and products with float weights (R37)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.attention_case import BF16, F16, F32, Array, call, pointer, to_bits, to_float
from tests.cuda.build import POLICIES, EmulatorError, Library
from tests.cuda.row_cases import Q4_0, Q4_1, Q8_0, PackedWeight, Rows, Weight, normal

SOURCES = ("embed.cu", "linear_float.cu", "linear.cu")
FLOATS = pytest.mark.parametrize("weight_type", [F32, F16, BF16], ids=["f32", "f16", "bf16"])


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*SOURCES)


def embed(library: Library, table: PackedWeight, tokens: list[int], scale: float = 1.0) -> Array:
    out = np.full((len(tokens), table.cols), np.nan, np.float32)
    call(library, "pyserve_cuda_embed", table, np.array(tokens, np.int32), len(tokens), scale, out)
    return out


def product(library: Library, weight_type: int, bits: Array, x: Array, bias: Array | None, onto: Array | None) -> Array:
    """out [num_rows, rows + 2]: two columns to spare"""
    rows, cols = bits.shape
    inputs = Rows(*x.shape, has_q8=False)
    inputs.f32[:] = x
    out = np.full((len(x), rows + 2), 4.0, np.float32)
    if onto is not None:
        out[:, :rows] = onto
    weight = PackedWeight(weight_type, rows, cols, pointer(bits))
    rest = (bias, out, rows + 2, len(x), onto is not None)
    call(library, "pyserve_cuda_linear_float", weight, inputs.structure(), *rest)
    return out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("weight_type", [Q8_0, Q4_0, Q4_1], ids=["q8_0", "q4_0", "q4_1"])
def test_every_value_of_a_packed_table(library: Library, weight_type: int, policy: int) -> None:
    library.configure(policy)
    weight, tokens = Weight(library, weight_type, 37, 160), [36, 0, 8, 15, 16, 36]
    np.testing.assert_array_equal(embed(library, weight.structure, tokens), weight.values[tokens].astype(np.float32))
    doubled = embed(library, weight.structure, tokens, 2.0)
    np.testing.assert_array_equal(doubled, 2 * weight.values[tokens].astype(np.float32))


@FLOATS
def test_every_value_of_a_float_table(library: Library, weight_type: int) -> None:
    bits, tokens = to_bits(normal(3, 9, 150), weight_type), [8, 0, 3]
    found = embed(library, PackedWeight(weight_type, 9, 150, pointer(bits)), tokens)
    np.testing.assert_array_equal(found, to_float(bits, weight_type)[tokens].astype(np.float32))


def test_rows_are_picked(library: Library) -> None:
    x, out = normal(4, 7, 130), np.full((3, 130), np.nan, np.float32)
    call(library, "pyserve_cuda_take_rows", x, 130, np.array([6, 0, 6], np.int32), 3, out)
    np.testing.assert_array_equal(out, x[[6, 0, 6]])


@FLOATS
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_rows", "rows", "cols"), [(1, 8, 32), (3, 13, 70), (19, 5, 300)])
def test_products(library: Library, weight_type: int, policy: int, num_rows: int, rows: int, cols: int) -> None:
    library.configure(policy)
    bits, x = to_bits(normal(5, rows, cols), weight_type), normal(6, num_rows, cols)
    bias, onto = normal(7, rows), normal(8, num_rows, rows)
    want = x.astype(np.float64) @ to_float(bits, weight_type).T
    out = product(library, weight_type, bits, x, None, None)
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=2e-5)
    assert (out[:, rows:] == 4.0).all()  # what stands beside is not touched
    out = product(library, weight_type, bits, x, bias, onto)
    np.testing.assert_allclose(out[:, :rows], want + bias + onto, rtol=1e-5, atol=2e-5)


@FLOATS
def test_a_row_is_the_same_alone_and_in_any_company(library: Library, weight_type: int) -> None:
    bits, x = to_bits(normal(9, 11, 200), weight_type), normal(10, 21, 200)
    together = product(library, weight_type, bits, x, None, None)
    for first, count in [(0, 1), (20, 1), (7, 9)]:
        some = product(library, weight_type, bits, x[first : first + count].copy(), None, None)
        np.testing.assert_array_equal(some, together[first : first + count])


def test_types_without_a_kernel_are_refused(library: Library) -> None:
    q5_0 = 6
    with pytest.raises(EmulatorError):
        embed(library, PackedWeight(q5_0, 1, 32, 0), [0])
    with pytest.raises(EmulatorError):
        product(library, Q8_0, np.zeros((1, 32), np.uint8), normal(1, 1, 32), None, None)
