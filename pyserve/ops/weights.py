"""Weight matrices in the layout that the CPU kernels read (csrc/cpu/linear_format.h).

Packing moves bits and changes no value.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

# GGML's names, in the order of WeightType in csrc/ops.h.
TYPE_NAMES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

# type -> (columns in a block of the file, bytes of that block)
_FILE_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_FLOAT_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [rows, cols] (rows = outputs). `type` is GGML's name; `data` is uint8, 64-byte aligned."""

    type: str
    rows: int
    cols: int
    data: torch.Tensor

    @property
    def type_id(self) -> int:
        """WeightType in C++."""
        return TYPE_NAMES.index(self.type)

    @property
    def is_quantised(self) -> bool:
        """Whether products with it read int8 activations."""
        return self.type not in _FLOAT_NAMES.values()


def file_bytes(type_name: str, rows: int, cols: int) -> int:
    """Size of a matrix [rows, cols] in a file.

    Raises ValueError for an unknown type and for columns that are no whole number of blocks.
    """
    if type_name not in _FILE_BLOCKS:
        raise ValueError(f"weight type {type_name} is not supported; supported: {', '.join(TYPE_NAMES)}")
    block_cols, block_bytes = _FILE_BLOCKS[type_name]
    if rows < 1 or cols < 1 or cols % block_cols:
        raise ValueError(
            f"a {type_name} matrix of {rows} x {cols}: columns must be a positive multiple of {block_cols}"
        )
    return rows * (cols // block_cols) * block_bytes


def pack(type_name: str, raw: torch.Tensor | np.ndarray, rows: int, cols: int) -> PackedWeight:
    """Packs the bytes of a matrix as a GGUF file has them (`raw` uint8, any shape), or a float tensor [rows, cols].

    A float tensor's dtype must be the one that `type_name` names. Raises ValueError when the size of `raw` is not that
    of `rows` x `cols` values of the type.
    """
    flat = file_values(type_name, raw, rows, cols)
    data = torch.ops.pyserve.pack(TYPE_NAMES.index(type_name), flat, rows, cols)
    return PackedWeight(type_name, rows, cols, data)


def file_values(type_name: str, raw: torch.Tensor | np.ndarray, rows: int, cols: int) -> torch.Tensor:
    """`raw` as `pack` takes it, checked: uint8 [bytes]."""
    expected = file_bytes(type_name, rows, cols)
    flat = _as_bytes(type_name, _from_numpy(raw) if isinstance(raw, np.ndarray) else raw)
    if flat.numel() != expected:
        raise ValueError(f"a {type_name} matrix of {rows} x {cols} has {expected} bytes, not {flat.numel()}")
    return flat


def broken_row(type_name: str, raw: torch.Tensor | np.ndarray, rows: int, cols: int) -> int | None:
    """The first row of a matrix, given as to `pack`, with a value that is NaN or infinite; or None."""
    row: int = torch.ops.pyserve.broken_row(
        TYPE_NAMES.index(type_name), file_values(type_name, raw, rows, cols), rows, cols
    )
    return None if row < 0 else row


def _from_numpy(raw: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a memory-mapped file is not writable, and nothing here writes
        return torch.from_numpy(raw)


def _as_bytes(type_name: str, raw: torch.Tensor) -> torch.Tensor:
    if raw.dtype != torch.uint8 and _FLOAT_NAMES.get(raw.dtype) != type_name:
        raise ValueError(f"{type_name} weights cannot be packed from a tensor of {raw.dtype}")
    return raw.contiguous().reshape(-1).view(torch.uint8)
