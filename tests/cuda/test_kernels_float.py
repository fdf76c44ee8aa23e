"""Products with float weights: emulated, against float64, and exact in any company (R37). f16 and bf16 weights have a
narrow and a tiled kernel on the tensor cores, which must agree to the bit; f32, and odd columns, a plain one.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.attention_case import BF16, F16, F32, to_bits, to_float
from tests.cuda.build import IN_ORDER, POLICIES, EmulatorError, Library
from tests.cuda.row_cases import FLOAT_PRODUCTS, Q8_0, float_product, normal

FLOATS = pytest.mark.parametrize("weight_type", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
HALVES = pytest.mark.parametrize("weight_type", [F16, BF16], ids=["f16", "bf16"])


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*FLOAT_PRODUCTS)


@FLOATS
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("num_rows", "rows", "cols"), [(1, 8, 32), (3, 13, 70), (19, 5, 300), (2, 33, 1096), (33, 3, 8), (70, 67, 328)]
)
def test_products(library: Library, weight_type: int, policy: int, num_rows: int, rows: int, cols: int) -> None:
    library.configure(policy)
    bits, x = to_bits(normal(5, rows, cols), weight_type), normal(6, num_rows, cols)
    out, want = float_product(library, weight_type, bits, x)
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=2e-5)
    assert (out[:, rows:] == 4.0).all()  # what stands beside is not touched
    out, want = float_product(library, weight_type, bits, x, normal(7, rows), normal(8, num_rows, rows))
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=2e-5)


@FLOATS
def test_the_error_against_unrounded_activations_is_small(library: Library, weight_type: int) -> None:
    """16 bits of an activation's mantissa are kept, whatever its size; rounding to bf16 keeps 8 and errs by 1e-4."""
    library.configure(IN_ORDER)
    bits, sizes = to_bits(normal(5, 16, 512), weight_type), np.float32([[1], [1e-20], [1e20], [1e5], [0]])
    x = normal(6, 5, 512) * sizes
    out, _ = float_product(library, weight_type, bits, x)
    exact = x.astype(np.float64) @ to_float(bits, weight_type).T
    size = np.abs(x).max(1, keepdims=True) * np.sqrt(512)
    assert (np.abs(out[:, :16] - exact) <= 4e-6 * size).all()


@FLOATS
@pytest.mark.parametrize("cols", [200, 203])
def test_a_row_is_the_same_alone_and_in_any_company(library: Library, weight_type: int, cols: int) -> None:
    library.configure(IN_ORDER)
    bits, x = to_bits(normal(9, 11, cols), weight_type), normal(10, 41, cols)
    together, _ = float_product(library, weight_type, bits, x)
    for first, count in [(0, 1), (40, 1), (7, 9), (3, 32), (5, 33)]:
        some, _ = float_product(library, weight_type, bits, x[first : first + count].copy())
        np.testing.assert_array_equal(some, together[first : first + count])


@HALVES
@pytest.mark.parametrize("cols", [8, 32, 264, 520])
def test_all_kernels_cut_the_columns_alike(library: Library, weight_type: int, cols: int) -> None:
    """Fewer chunks than spans, spans of unequal length, a quarter of a chunk at the end."""
    library.configure(IN_ORDER)
    bits, x = to_bits(normal(9, 70, cols), weight_type), normal(10, 32, cols)
    narrow, _ = float_product(library, weight_type, bits, x)
    for tile in (64, 128):
        np.testing.assert_array_equal(float_product(library, weight_type, bits, x, tile=tile)[0], narrow)


@HALVES
@pytest.mark.parametrize("num_rows", [8, 64])
def test_an_infinite_activation_spoils_its_own_row_only(library: Library, weight_type: int, num_rows: int) -> None:
    bits, x = to_bits(normal(9, 16, 64), weight_type), normal(10, num_rows, 64)
    x[3, 40] = np.inf
    out, _ = float_product(library, weight_type, bits, x)
    is_finite = np.isfinite(out[:, :16])
    assert not is_finite[3].any()
    assert np.delete(is_finite, 3, 0).all()


def test_what_cannot_be_done_is_refused(library: Library) -> None:
    with pytest.raises(EmulatorError):
        float_product(library, Q8_0, np.zeros((1, 32), np.uint8), normal(1, 1, 32))
    odd = to_bits(normal(9, 16, 12), BF16)
    with pytest.raises(EmulatorError):
        float_product(library, BF16, odd, normal(1, 1, 12), tile=64)
    with pytest.raises(EmulatorError):
        float_product(library, BF16, to_bits(normal(9, 16, 8), BF16), normal(1, 1, 8), tile=32)
