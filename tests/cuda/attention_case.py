"""One attention problem: a pool whose unowned cells are NaN, rows of several sequences, and the float64 answer.

Everything is numpy and ctypes, so that the sanitizers' children can run it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.cuda.build import Library

Array = NDArray[Any]
F32, F16, BF16 = range(3)  # DType of csrc/ops.h
UNIT_LEN = 64  # of csrc/cuda/tiles.h
TIE = 3e-5  # relative distance from a tie within which a weight may be rounded either way
HALF_UNIT = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}  # relative error of one rounding, at most


def to_bits(x: Array, dtype: int) -> Array:
    """float -> storage: uint16 bits of f16 or bf16 (nearest, ties to even), float32 as it is."""
    if dtype == F32:
        return np.ascontiguousarray(x, np.float32)
    if dtype == F16:
        return np.ascontiguousarray(x, np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(bits: Array, dtype: int) -> Array:
    """storage -> float64"""
    if dtype == F32:
        return bits.astype(np.float64)
    if dtype == F16:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int64), ("stride", ctypes.c_int64))


class Device(ctypes.Structure):
    _fields_ = (("num_sms", ctypes.c_int32), ("shared_bytes", ctypes.c_int32))


class Pool(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("num_pages", "num_layers", "num_kv_heads", "page_size", "head_dim")),
    )


class StepRows(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("page_table_width", ctypes.c_int64),
    )


class AttentionSpec(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
    )


def pointer(array: Array) -> int:
    return int(array.ctypes.data)


H200 = Device(132, 232448)


@dataclass
class Case:
    """`lens[s]` tokens of sequence s have K and V; `rows` are (sequence, position)."""

    lens: list[int]
    rows: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    pool_type: int = BF16
    q_type: int = F32
    scale: float = 0.0
    softcap: float = 0.0
    window: int = 0
    seed: int = 0
    layer: int = 1
    num_layers: int = 2
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.scale = self.scale or self.head_dim**-0.5
        width = -(-max(self.lens) // self.page_size)
        num_pages = len(self.lens) * width + 3
        shape = (num_pages, self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)
        nan = np.float32(np.nan) if self.pool_type == F32 else 0x7FFF
        self.pool = np.full(shape, nan, np.float32 if self.pool_type == F32 else np.uint16)
        self.table = np.full((len(self.lens), width), num_pages - 1, np.int32)
        pages = np.random.default_rng(self.seed + 1).permutation(num_pages - 1)
        self.keys, self.values = [], []
        for s, length in enumerate(self.lens):
            count = -(-length // self.page_size)
            self.table[s, :count], pages = pages[:count], pages[count:]
            cells = random.standard_normal((2, length, self.num_kv_heads, self.head_dim))
            cells[0] *= 1.5  # some weights near 1
            bits = to_bits(cells, self.pool_type)
            where = np.arange(length)
            page, place = self.table[s, where // self.page_size], where % self.page_size
            for i in (0, 1):
                self.pool[page, self.layer, i, :, place] = bits[i]
            self.forget(s, page, place)
            self.keys.append(to_float(bits[0], self.pool_type))
            self.values.append(to_float(bits[1], self.pool_type))
        self.positions = np.array([p for _, p in self.rows], np.int32)
        self.sequences = np.array([s for s, _ in self.rows], np.int32)
        queries = [
            np.random.default_rng((self.seed, s, p)).standard_normal((self.num_heads, self.head_dim)) * 1.5
            for s, p in self.rows
        ]
        self.q = to_bits(np.stack(queries), self.q_type)  # [rows, heads, head_dim]: a row's own, in any company

    def forget(self, sequence: int, page: Array, place: Array) -> None:
        """What no row sees any more through its window may be anyone's."""
        earliest = min((p for s, p in self.rows if s == sequence), default=0)
        count = max(0, earliest - self.window + 1) if self.window else 0
        nan = np.nan if self.pool_type == F32 else 0x7FFF
        self.pool[page[:count], self.layer, :, :, place[:count]] = nan

    def structures(self) -> tuple[Matrix, AttentionSpec, Pool, StepRows]:
        stride = self.num_heads * self.head_dim
        q = Matrix(pointer(self.q), self.q_type, stride)
        spec = AttentionSpec(self.num_heads, self.layer, self.scale, self.softcap, self.window)
        pool = Pool(pointer(self.pool), self.pool_type, len(self.pool), *self.pool.shape[1:2], *self.pool.shape[3:])
        rows = StepRows(
            len(self.rows),
            pointer(self.positions),
            pointer(self.sequences),
            pointer(self.table),
            self.table.shape[1],
        )
        return q, spec, pool, rows

    def output(self, out_type: int) -> Array:
        nan = np.float32(np.nan) if out_type == F32 else 0x7FFF
        return np.full(
            (len(self.rows), self.num_heads, self.head_dim), nan, np.float32 if out_type == F32 else np.uint16
        )

    def decode(self, library: Library, out_type: int = F32, device: Device = H200, repeats: int = 0) -> Array:
        """Bits of [rows, heads, head_dim], each row by itself; repeated with the first call's plan."""
        q, spec, pool, rows = self.structures()
        out = self.output(out_type)
        scratch = nan_bytes(decode_scratch_bytes(library, self, device))
        matrix = Matrix(pointer(out), out_type, self.num_heads * self.head_dim)
        arguments = (q, spec, pool, rows, matrix, scratch, scratch.nbytes, device)
        call(library, "pyserve_cuda_attention_decode", *arguments)
        for _ in range(repeats):
            out[:] = self.output(out_type)
            call(library, "pyserve_cuda_attention_decode_planned", *arguments)
        return out

    def prefill(self, library: Library, out_type: int = F32, device: Device = H200) -> Array:
        """The same, adjacent rows of one sequence in tiles."""
        q, spec, pool, rows = self.structures()
        out = self.output(out_type)
        tiles = self.tiles(library, device)
        size = library.so.pyserve_cuda_attention_prefill_scratch_bytes
        size.restype = ctypes.c_int64
        sizes = (ctypes.c_int64(v) for v in (len(tiles), self.num_kv_heads, self.head_dim))
        scratch = nan_bytes(size(*sizes, ctypes.byref(device)))
        matrix = Matrix(pointer(out), out_type, self.num_heads * self.head_dim)
        call(
            library,
            "pyserve_cuda_attention_prefill",
            *(q, spec, pool, rows, matrix, tiles, len(tiles), scratch, scratch.nbytes, device),
        )
        return out

    def full(self, library: Library, out_type: int = F32) -> Array:
        """The same over KV in f32: one kernel for all rows."""
        q, spec, pool, rows = self.structures()
        out = self.output(out_type)
        matrix = Matrix(pointer(out), out_type, self.num_heads * self.head_dim)
        call(library, "pyserve_cuda_attention_f32", q, spec, pool, rows, matrix)
        return out

    def tiles(self, library: Library, device: Device) -> Array:
        """[tiles, 3]: first row, rows of the chunk, first query row"""
        queries = library.so.pyserve_cuda_attention_prefill_queries(ctypes.c_int64(self.head_dim), ctypes.byref(device))
        group = self.num_heads // self.num_kv_heads
        chunks = self.chunks()
        tiles = np.zeros((len(self.rows) * group, 3), np.int32)
        cut = library.so.pyserve_cuda_attention_prefill_tiles
        cut.restype = ctypes.c_int64
        numbers = [ctypes.c_int64(v) for v in (len(chunks), group, queries)]
        room = (ctypes.c_void_p(pointer(tiles)), ctypes.c_int64(len(tiles)))
        count = cut(ctypes.c_void_p(pointer(chunks)), *numbers, *room)
        if count < 0:
            raise ValueError("no tiles")
        return tiles[:count]

    def chunks(self) -> Array:
        starts = [i for i, (s, _) in enumerate(self.rows) if i == 0 or self.rows[i - 1][0] != s]
        ends = [*starts[1:], len(self.rows)]
        return np.array([(a, b - a, self.rows[b - 1][1]) for a, b in zip(starts, ends, strict=True)], np.int32)

    def excess(self, out: Array, out_type: int = F32) -> float:
        """How far the worst value is beyond what float arithmetic explains; NaN counts as infinitely far.

        The reference rounds queries and weights as the kernels do, so that one key too many or too few shows. Allowed
        are the rounding of the output and, where a weight lies so near a tie that float may decide the other way, that.
        """
        worst, got = -np.inf, to_float(out, out_type)
        if np.isnan(got).any():
            return float("inf")
        q = to_float(to_bits(to_float(self.q, self.q_type), self.pool_type), self.pool_type)
        for row, (s, position) in enumerate(self.rows):
            want, ties = self.attend(q[row], s, position)
            allowed = ties + HALF_UNIT[out_type] * np.abs(want) + 5e-6
            worst = max(worst, float((np.abs(got[row] - want) - allowed).max()))
        return worst

    def attend(self, q: Array, s: int, position: int) -> tuple[Array, Array]:
        """The answer [heads, head_dim] in float64, and what weights near a tie may change in it."""
        first = max(0, position - self.window + 1) if self.window else 0
        group = self.num_heads // self.num_kv_heads
        keys = self.keys[s][first : position + 1].repeat(group, axis=1)  # [n, heads, head_dim]
        values = self.values[s][first : position + 1].repeat(group, axis=1)
        scores = np.einsum("hd,nhd->hn", q, keys) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        units = np.arange(first, position + 1) // UNIT_LEN
        largest = np.stack([scores[:, units == u].max(1) for u in np.unique(units)], 1)[:, units - units[0]]
        exact = np.exp(scores - largest)
        lower, kept, upper = (self.rounded(exact * factor) for factor in (1 - TIE, 1.0, 1 + TIE))
        outer = np.exp(largest - scores.max(1, keepdims=True))
        total = (kept * outer).sum(1, keepdims=True)
        answer = np.einsum("hn,nhd->hd", kept * outer / total, values)
        doubt = (upper - lower) * (upper - lower > 3 * TIE * exact) * outer / total
        return answer, np.einsum("hn,nhd->hd", doubt, np.abs(values - answer[None]))

    def rounded(self, x: Array) -> Array:
        return to_float(to_bits(x, self.pool_type), self.pool_type)


def nan_bytes(count: int) -> Array:
    """Scratch [count] uint8, 16-byte aligned, every float in it NaN."""
    whole = np.full(count + 16, 0xFF, np.uint8)
    offset = -pointer(whole) % 16
    return whole[offset : offset + count]


def decode_scratch_bytes(library: Library, case: Case, device: Device) -> int:
    size = library.so.pyserve_cuda_attention_decode_scratch_bytes
    size.restype = ctypes.c_int64
    context_len = case.table.shape[1] * case.page_size
    numbers = (len(case.rows), case.num_heads, case.num_kv_heads, case.head_dim, context_len, case.window)
    return int(size(*(ctypes.c_int64(n) for n in numbers), ctypes.byref(device)))


def call(library: Library, function: str, *arguments: Any) -> None:
    """Structures go by reference; the stream is null."""
    library.call(function, *(ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments), None)
