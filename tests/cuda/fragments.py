"""Which element of a matrix each lane of a warp holds, for mma.m16n8k16, m16n8k32 and ldmatrix: written down from the
PTX ISA a second time, apart from the emulator, to check both it and a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]


def a_fragments(a: Matrix) -> Matrix:
    """[16, 16] -> [32 lanes, 8]: element v of lane l is number i, counted down the columns."""
    out = np.zeros((32, 8), a.dtype)
    for lane in range(32):
        for v in range(8):
            i = 32 * (lane % 4) + lane // 4 + 16 * (v & 1) + 8 * (v >> 1 & 1) + 128 * (v >> 2)
            out[lane, v] = a[i % 16, i // 16]
    return out


def b_fragments(b: Matrix) -> Matrix:
    """[8, 16] -> [32, 4]"""
    out = np.zeros((32, 4), b.dtype)
    for lane in range(32):
        for v in range(4):
            i = 16 * (lane % 4) + lane // 4 + 8 * (v & 1) + 64 * (v >> 1)
            out[lane, v] = b[i % 8, i // 8]
    return out


def c_fragments(c: Matrix) -> Matrix:
    """[16, 8] -> [32, 4]"""
    out = np.zeros((32, 4), c.dtype)
    for lane in range(32):
        for v in range(4):
            i = 32 * (lane % 4) + lane // 4 + 16 * (v & 1) + 8 * (v >> 1)
            out[lane, v] = c[i % 16, i // 16]
    return out


def a_byte_fragments(a: Matrix) -> Matrix:
    """int8 [16, 32] -> [32, 16]"""
    out = np.zeros((32, 16), a.dtype)
    for lane in range(32):
        for v in range(16):
            out[lane, v] = a[lane // 4 + 8 * (v >> 2 & 1), 4 * (lane % 4) + (v & 3) + 16 * (v >> 3)]
    return out


def b_byte_fragments(b: Matrix) -> Matrix:
    """int8 [8, 32] -> [32, 8]"""
    out = np.zeros((32, 8), b.dtype)
    for lane in range(32):
        for v in range(8):
            out[lane, v] = b[lane // 4, 4 * (lane % 4) + (v & 3) + 16 * (v >> 2)]
    return out


def loaded_matrices(matrices: Matrix) -> Matrix:
    """What ldmatrix gives of [n, 8, 8]: [32, n, 2]"""
    return matrices.reshape(len(matrices), 32, 2).transpose(1, 0, 2)


def bf16_bits(values: Matrix) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
