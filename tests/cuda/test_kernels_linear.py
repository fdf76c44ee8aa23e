"""8- and 4-bit products: emulated, against float64 on the same rounded activations, and exact in any company (R37)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.build import POLICIES, EmulatorError, Library
from tests.cuda.row_cases import Q4_0, Q4_1, Q8_0, SOURCES, Rows, Weight, linear, normal, quantise

TYPES = pytest.mark.parametrize("weight_type", [Q8_0, Q4_0, Q4_1], ids=["q8_0", "q4_0", "q4_1"])


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*SOURCES)


@TYPES
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_rows", "rows", "cols"), [(1, 16, 64), (3, 37, 96), (11, 20, 1120), (35, 5, 160)])
def test_products(library: Library, weight_type: int, policy: int, num_rows: int, rows: int, cols: int) -> None:
    library.configure(policy)
    weight, x = Weight(library, weight_type, rows, cols), quantise(library, normal(1, num_rows, cols))
    out, want = linear(library, weight, x)
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=1e-5)
    assert (out[:, rows:] == 4.0).all()  # what stands beside is not touched


@TYPES
def test_bias_and_accumulation(library: Library, weight_type: int) -> None:
    weight, x = Weight(library, weight_type, 21, 128), quantise(library, normal(1, 9, 128))
    out, want = linear(library, weight, x, normal(2, 21), normal(3, 9, 21))
    np.testing.assert_allclose(out[:, :21], want, rtol=1e-5, atol=1e-5)


@TYPES
def test_each_value_survives_packing(library: Library, weight_type: int) -> None:
    """One activation of 127, all others 0: its column of the weights comes out, to the bit."""
    rows, cols = 18, 96
    weight = Weight(library, weight_type, rows, cols)
    for first in range(0, cols, 32):
        x = Rows(32, cols)
        x.q8[:], x.scale[:] = 0, np.float32(1)
        x.q8[np.arange(32), first + np.arange(32)] = 1
        x.sum[:] = x.q8.reshape(32, -1, 32).sum(2)
        out, _ = linear(library, weight, x)
        np.testing.assert_array_equal(out[:, :rows], weight.values[:, first : first + 32].T.astype(np.float32))


@TYPES
def test_a_row_is_the_same_alone_and_in_any_company(library: Library, weight_type: int) -> None:
    weight, x = Weight(library, weight_type, 17, 1120), normal(1, 33, 1120)
    together, _ = linear(library, weight, quantise(library, x))
    for first, count in [(0, 1), (7, 1), (32, 1), (3, 8), (9, 12)]:
        some, _ = linear(library, weight, quantise(library, x[first : first + count].copy()))
        np.testing.assert_array_equal(some, together[first : first + count])


def test_an_infinite_activation_spoils_its_own_row_only(library: Library) -> None:
    weight, x = Weight(library, Q4_0, 16, 64), normal(1, 8, 64)
    x[3, 40] = np.inf
    out, _ = linear(library, weight, quantise(library, x))
    is_nan = np.isnan(out[:, :16])
    assert is_nan[3].all()
    assert not np.delete(is_nan, 3, 0).any()


def test_what_cannot_be_done_is_refused(library: Library) -> None:
    weight = Weight(library, Q8_0, 16, 64)
    with pytest.raises(EmulatorError):
        linear(library, weight, quantise(library, normal(1, 1, 96)))  # other columns
    with pytest.raises(EmulatorError):
        library.call("pyserve_cuda_pack", 8, np.zeros(1, np.uint8), 16, 64, np.zeros(1, np.uint8))  # q4_k
