"""Embeddings out of packed tables and float ones, and rows that are picked: emulated, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.attention_case import BF16, F16, F32, call, pointer, to_bits, to_float
from tests.cuda.build import POLICIES, EmulatorError, Library
from tests.cuda.row_cases import NAMES, QUANTISED, PackedWeight, Weight, columns, embed, normal

SOURCES = ("embed.cu", "pack.cu")


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(*SOURCES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("weight_type", QUANTISED, ids=[NAMES[each] for each in QUANTISED])
def test_every_value_of_a_packed_table(library: Library, weight_type: int, policy: int) -> None:
    library.configure(policy)
    weight, tokens = Weight(library, weight_type, 37, columns(weight_type, 5)), [36, 0, 8, 15, 16, 36]
    np.testing.assert_array_equal(embed(library, weight.structure, tokens), weight.values[tokens].astype(np.float32))
    doubled = embed(library, weight.structure, tokens, 2.0)
    np.testing.assert_array_equal(doubled, 2 * weight.values[tokens].astype(np.float32))


@pytest.mark.parametrize("weight_type", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_every_value_of_a_float_table(library: Library, weight_type: int) -> None:
    bits, tokens = to_bits(normal(3, 9, 150), weight_type), [8, 0, 3]
    found = embed(library, PackedWeight(weight_type, 9, 150, pointer(bits)), tokens)
    np.testing.assert_array_equal(found, to_float(bits, weight_type)[tokens].astype(np.float32))


def test_rows_are_picked(library: Library) -> None:
    x, out = normal(4, 7, 130), np.full((3, 130), np.nan, np.float32)
    call(library, "pyserve_cuda_take_rows", x, 130, np.array([6, 0, 6], np.int32), 3, out)
    np.testing.assert_array_equal(out, x[[6, 0, 6]])


def test_a_type_without_a_kernel_is_refused(library: Library) -> None:
    with pytest.raises(EmulatorError):
        embed(library, PackedWeight(len(NAMES), 1, 32, 0), [0])
