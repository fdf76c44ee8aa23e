"""Packing changes no value: what is read back is what the `gguf` package reads from the file's bytes, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyserve.ops  # noqa: F401  loads the kernels
from pyserve.ops.weights import TYPE_NAMES, broken_row, file_bytes, pack
from tests.ops.weight_cases import FLOAT_DTYPES, block_cols, random_matrix

# Where in a block its scale is, and its minimum.
HALVES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def read_back(name: str, raw: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    weight = pack(name, raw, rows, cols)
    tokens = torch.arange(rows, dtype=torch.int32)
    values: torch.Tensor = torch.ops.pyserve.embed(tokens, weight.data, weight.type_id, rows, cols)
    return values.double()


@given(
    name=st.sampled_from(TYPE_NAMES), rows=st.integers(1, 50), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1)
)
@settings(max_examples=80, deadline=None)
def test_every_value_survives(name: str, rows: int, blocks: int, seed: int) -> None:
    cols = blocks * (block_cols(name) if name not in FLOAT_DTYPES else 7)
    raw, values = random_matrix(name, rows, cols, seed)
    assert torch.equal(read_back(name, raw, rows, cols), values)


@pytest.mark.parametrize("name", TYPE_NAMES)
@pytest.mark.parametrize("fill", [0, 255])
def test_extreme_quantised_values_survive(name: str, fill: int) -> None:
    raw, values = random_matrix(name, 17, 512, fill=fill)
    assert torch.equal(read_back(name, raw, 17, 512), values)


@pytest.mark.parametrize(("name", "growth"), [(name, 1.05) for name in TYPE_NAMES])
def test_packed_size_stays_near_the_files(name: str, growth: float) -> None:
    raw, _ = random_matrix(name, 64, 1024)
    weight = pack(name, raw, 64, 1024)
    assert weight.data.numel() <= growth * file_bytes(name, 64, 1024)
    assert weight.data.data_ptr() % 64 == 0


@pytest.mark.parametrize(("name", "dtype"), FLOAT_DTYPES.items())
def test_a_float_tensor_is_packed_as_it_is(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(5, 9).to(dtype)
    assert torch.equal(read_back(name, values, 5, 9), values.double())


def test_a_read_only_array_is_packed_without_a_warning() -> None:
    raw, values = random_matrix("Q4_1", 16, 64)
    array = np.array(raw.numpy())
    array.flags.writeable = False
    weight = pack("Q4_1", array, 16, 64)
    tokens = torch.arange(16, dtype=torch.int32)
    assert torch.equal(torch.ops.pyserve.embed(tokens, weight.data, weight.type_id, 16, 64).double(), values)


def test_embedding_scales_rows() -> None:
    raw, values = random_matrix("Q8_0", 40, 64)
    weight = pack("Q8_0", raw, 40, 64)
    tokens = torch.tensor([39, 0, 17, 17], dtype=torch.int32)
    out = torch.ops.pyserve.embed(tokens, weight.data, weight.type_id, 40, 64, 8.0)
    assert torch.equal(out.double(), values[tokens.long()] * 8)


@pytest.mark.parametrize(
    ("name", "num_bytes", "rows", "cols", "message"),
    [
        ("Q4_2", 64, 1, 32, "weight type Q4_2 is not supported"),
        ("Q4_1", 20, 1, 40, "multiple of 32"),
        ("Q6_K", 210, 1, 128, "multiple of 256"),
        ("Q8_0", 33, 1, 32, "has 34 bytes, not 33"),
        ("F32", 0, 0, 4, "positive"),
    ],
)
def test_a_matrix_that_does_not_fit_its_type_is_refused(
    name: str, num_bytes: int, rows: int, cols: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(name, torch.zeros(num_bytes, dtype=torch.uint8), rows, cols)


def test_a_tensor_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"F16 weights cannot be packed from a tensor of torch.float32"):
        pack("F16", torch.zeros(4, 4), 4, 4)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_a_row_with_a_value_that_is_none_is_found(name: str) -> None:
    """Wherever in the row its number, or the scale or minimum of one of its blocks, is NaN or infinite."""
    rows, num_blocks = 5, 3
    cols = num_blocks * (block_cols(name) if name not in FLOAT_DTYPES else 7)
    raw, _ = random_matrix(name, rows, cols, 3)
    assert broken_row(name, raw, rows, cols) is None
    raw = raw.reshape(rows, -1)
    size = raw.shape[1] // (num_blocks if name not in FLOAT_DTYPES else cols)
    if name in FLOAT_DTYPES:
        places, value_of = [0, cols // 2 * size, (cols - 1) * size], FLOAT_DTYPES[name]
    else:
        places, value_of = [block * size + at for block in range(num_blocks) for at in HALVES[name]], torch.float16
    for place in places:
        for value in (math.nan, math.inf, -math.inf):
            bad = raw.clone()
            bits = torch.tensor([value]).to(value_of).view(torch.uint8)
            bad[3, place : place + bits.numel()] = bad[4, place : place + bits.numel()] = bits
            assert broken_row(name, bad, rows, cols) == 3, (place, value)
