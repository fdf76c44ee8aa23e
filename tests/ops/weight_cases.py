"""Random matrices as a file has them, beside the values that the `gguf` package reads from the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from pyserve.ops.weights import TYPE_NAMES, file_bytes

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = [name for name in TYPE_NAMES if name not in FLOAT_DTYPES]
_NUM_HALVES = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 1}
_BLOCK_COLS = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}


def block_cols(name: str) -> int:
    """Columns must be a multiple of it."""
    return 1 if name in FLOAT_DTYPES else _BLOCK_COLS.get(name, 32)


def values_of(name: str, raw: np.ndarray) -> torch.Tensor:
    """float64 [rows, cols] of a file's bytes [rows, bytes]."""
    return torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[name])).double()


def random_matrix(
    name: str, rows: int, cols: int, seed: int = 0, fill: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes uint8 [rows, bytes], values float64 [rows, cols]).

    Quantised values and the 6-bit and 8-bit scales are random in every bit, or `fill` in each byte; f16 scales are of
    ordinary size.
    """
    rng = np.random.default_rng(seed)
    if name in FLOAT_DTYPES:
        values = torch.from_numpy(rng.standard_normal((rows, cols)).astype(np.float32)).to(FLOAT_DTYPES[name])
        return values.view(torch.uint8), values.double()
    num_blocks = rows * cols // block_cols(name)
    raw = rng.integers(0, 256, (num_blocks, file_bytes(name, 1, block_cols(name))), dtype=np.uint8)
    if fill is not None:
        raw[:] = fill
    halves = (rng.standard_normal((num_blocks, _NUM_HALVES[name])) * 0.1).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        raw[:, -2:] = halves
    else:
        raw[:, : halves.shape[1]] = halves
    raw = raw.reshape(rows, -1)
    return torch.from_numpy(raw), values_of(name, raw)
