"""Products with quantised weights: emulated, against float64 on the same rounded activations, and exact in any company
(R37). The narrow kernel and the tiled one must agree to the bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.build import IN_ORDER, POLICIES, RANDOM, EmulatorError, Library
from tests.cuda.row_cases import (
    NAMES,
    PRODUCTS,
    Q4_0,
    Q4_K,
    Q8_0,
    QUANTISED,
    Rows,
    Weight,
    columns,
    linear,
    normal,
    quantise,
)

TYPES = pytest.mark.parametrize("weight_type", QUANTISED, ids=[NAMES[each] for each in QUANTISED])
BOTH = pytest.mark.parametrize("tile", [None, 64], ids=["narrow", "tiled"])


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*PRODUCTS)


@TYPES
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_rows", "rows", "num_blocks"), [(1, 16, 2), (3, 37, 3), (11, 20, 35)])
def test_few_rows(library: Library, weight_type: int, policy: int, num_rows: int, rows: int, num_blocks: int) -> None:
    library.configure(policy)
    cols = columns(weight_type, num_blocks)
    weight, x = Weight(library, weight_type, rows, cols), quantise(library, normal(1, num_rows, cols))
    out, want = linear(library, weight, x)
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=1e-5)
    assert (out[:, rows:] == 4.0).all()  # what stands beside is not touched


@TYPES
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_rows", "rows", "num_blocks"), [(33, 5, 1), (70, 67, 19)])
def test_many_rows(library: Library, weight_type: int, policy: int, num_rows: int, rows: int, num_blocks: int) -> None:
    """Tiles of 64 x 64, over the edges on both sides; more steps than the ring has slots."""
    library.configure(policy)
    cols = columns(weight_type, num_blocks)
    weight, x = Weight(library, weight_type, rows, cols), quantise(library, normal(1, num_rows, cols))
    out, want = linear(library, weight, x)
    np.testing.assert_allclose(out[:, :rows], want, rtol=1e-5, atol=1e-5)
    assert (out[:, rows:] == 4.0).all()


@TYPES
def test_large_tiles_change_no_bit(library: Library, weight_type: int) -> None:
    library.configure(IN_ORDER)
    cols = columns(weight_type, 9)
    weight, x = Weight(library, weight_type, 131, cols), quantise(library, normal(1, 129, cols))
    out, want = linear(library, weight, x, tile=128)
    np.testing.assert_allclose(out[:, :131], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(linear(library, weight, x, tile=64)[0], out)


def test_enough_outputs_get_large_tiles(library: Library) -> None:
    library.configure(IN_ORDER)
    weight, x = Weight(library, Q8_0, 1025, 32), quantise(library, normal(1, 1921, 32))
    blocks = []
    for tile in (0, 64, 128):
        started = library.so.emulator_num_threads_run()
        linear(library, weight, x, tile=tile)
        blocks.append((library.so.emulator_num_threads_run() - started) // 256)
    assert blocks == [9 * 16, 17 * 31, 9 * 16]


@TYPES
@pytest.mark.parametrize("num_rows", [9, 40])
def test_bias_and_accumulation(library: Library, weight_type: int, num_rows: int) -> None:
    cols = columns(weight_type, 4)
    weight, x = Weight(library, weight_type, 21, cols), quantise(library, normal(1, num_rows, cols))
    out, want = linear(library, weight, x, normal(2, 21), normal(3, num_rows, 21))
    np.testing.assert_allclose(out[:, :21], want, rtol=1e-5, atol=1e-5)


@TYPES
@BOTH
def test_each_value_survives_packing(library: Library, weight_type: int, tile: int | None) -> None:
    """One activation of 1, all others 0: its column of the weights comes out, to the bit."""
    rows, cols = 18, columns(weight_type, 3)
    weight = Weight(library, weight_type, rows, cols)
    for first in range(0, cols, 32):
        x = Rows(32, cols)
        x.q8[:], x.scale[:] = 0, np.float32(1)
        x.q8[np.arange(32), first + np.arange(32)] = 1
        x.sum[:] = x.q8.reshape(32, -1, 32).sum(2)
        out, _ = linear(library, weight, x, tile=tile)
        np.testing.assert_array_equal(out[:, :rows], weight.values[:, first : first + 32].T.astype(np.float32))


@TYPES
def test_a_row_is_the_same_alone_and_in_any_company(library: Library, weight_type: int) -> None:
    """Through both kernels, on either side of the number of rows at which the other one takes over."""
    library.configure(RANDOM)
    cols = columns(weight_type, 35)
    weight, x = Weight(library, weight_type, 17, cols), normal(1, 65, cols)
    together, _ = linear(library, weight, quantise(library, x))
    for first, count in [(7, 1), (64, 1), (3, 8), (9, 32), (11, 33)]:
        some, _ = linear(library, weight, quantise(library, x[first : first + count].copy()))
        np.testing.assert_array_equal(some, together[first : first + count])


@TYPES
@pytest.mark.parametrize("num_blocks", [1, 9, 15, 17])
def test_both_kernels_cut_the_columns_alike(library: Library, weight_type: int, num_blocks: int) -> None:
    """Fewer steps than spans, spans of unequal length, half a step at the end."""
    cols = columns(weight_type, num_blocks)
    weight, x = Weight(library, weight_type, 16, cols), quantise(library, normal(1, 8, cols))
    np.testing.assert_array_equal(linear(library, weight, x)[0], linear(library, weight, x, tile=64)[0])


@pytest.mark.parametrize("num_rows", [8, 64])
def test_an_infinite_activation_spoils_its_own_row_only(library: Library, num_rows: int) -> None:
    weight, x = Weight(library, Q4_0, 16, 64), normal(1, num_rows, 64)
    x[3, 40] = np.inf
    out, _ = linear(library, weight, quantise(library, x))
    is_nan = np.isnan(out[:, :16])
    assert is_nan[3].all()
    assert not np.delete(is_nan, 3, 0).any()


@BOTH
def test_what_cannot_be_done_is_refused(library: Library, tile: int | None) -> None:
    weight = Weight(library, Q8_0, 16, 64)
    with pytest.raises(EmulatorError):
        linear(library, weight, quantise(library, normal(1, 1, 96)), tile=tile)  # other columns
    weight.structure.type = 2
    with pytest.raises(EmulatorError):
        linear(library, weight, quantise(library, normal(1, 1, 64)), tile=tile)  # bf16
    if tile is not None:
        with pytest.raises(EmulatorError):
            linear(library, Weight(library, Q8_0, 16, 64), quantise(library, normal(1, 1, 64)), tile=96)
    for weight_type, cols in [(Q4_K, 128), (Q8_0, 48), (11, 256), (2, 64)]:
        with pytest.raises(EmulatorError):
            library.call("pyserve_cuda_pack", weight_type, np.zeros(1, np.uint8), 16, cols, np.zeros(1, np.uint8))
