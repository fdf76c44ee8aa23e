"""The kernels over rows of activations, called with random input and held against float64.

Numpy and ctypes only, so that the sanitizers' children can run it. Each `*_case` returns the kernel's output and the
wanted one; arrays have the exact size, so that one step too far is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from tests.cuda.attention_case import BF16, F16, F32, Array, Pool, StepRows, call, pointer, to_bits, to_float
from tests.cuda.build import Library

PRODUCTS = ("pack.cu", "linear.cu", "linear_tiled.cu")
FLOAT_PRODUCTS = ("linear_float.cu", "linear_half.cu", "linear_half_tiled.cu")
SAMPLING = ("sample.cu", "draw.cu", "follow.cu")
SOURCES = ("norm.cu", "activation.cu", "kv_write.cu", "embed.cu", *SAMPLING, *PRODUCTS, *FLOAT_PRODUCTS)
BLOCK_LEN = 32
SILU, GELU_TANH = 0, 1
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K = range(3, 11)  # WeightType of csrc/ops.h
QUANTISED = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)
NAMES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
HAS_MIN = (Q4_1, Q5_1, Q4_K, Q5_K)


class Activations(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("f32", "q8", "q8_scale", "q8_sum")),
        ("width", ctypes.c_int64),
    )


class PackedWeight(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class RopeTable(ctypes.Structure):
    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("max_positions", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("is_interleaved", ctypes.c_bool),
    )


class HeadNorm(ctypes.Structure):
    _fields_ = (("q_weight", ctypes.c_void_p), ("k_weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class Rows:
    """Activations [num_rows, width] with their int8 half."""

    def __init__(self, num_rows: int, width: int, *, has_q8: bool = True) -> None:
        self.f32 = np.full((num_rows, width), np.nan, np.float32)
        self.q8 = np.full((num_rows, width), 77, np.int8)
        self.scale = np.full((num_rows, width // BLOCK_LEN), np.nan, np.float32)
        self.sum = np.full((num_rows, width // BLOCK_LEN), -1, np.int32)
        self.has_q8 = has_q8

    def structure(self) -> Activations:
        rest = [pointer(a) if self.has_q8 else 0 for a in (self.q8, self.scale, self.sum)]
        return Activations(pointer(self.f32), *rest, self.f32.shape[1])

    def dequantised(self) -> Array:
        return self.q8.astype(np.float64) * self.scale.astype(np.float64).repeat(BLOCK_LEN, 1)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantise(library: Library, x: Array) -> Rows:
    rows = Rows(*x.shape)
    rows.f32[:] = x
    call(library, "pyserve_cuda_quantise", rows.structure(), len(x))
    return rows


def rms_norm(
    library: Library, x: Array, residual: Array | None = None, *, eps: float = 1e-5, has_q8: bool = False
) -> tuple[Rows, Array]:
    """The output, and what is wanted in float64; `residual` is changed in place."""
    weight, out = normal(99, x.shape[1]), Rows(*x.shape, has_q8=has_q8)
    total = x.astype(np.float64) + (0 if residual is None else residual)
    call(library, "pyserve_cuda_rms_norm", x, residual, weight, eps, out.structure(), len(x))
    return out, total / np.sqrt((total**2).mean(1, keepdims=True) + eps) * weight


def gated_activation(library: Library, gate_up: Array, kind: int, *, has_q8: bool = False) -> tuple[Rows, Array]:
    width = gate_up.shape[1] // 2
    out, (gate, up) = Rows(len(gate_up), width, has_q8=has_q8), np.split(gate_up.astype(np.float64), 2, 1)
    call(library, "pyserve_cuda_gated_activation", kind, gate_up, out.structure(), len(gate_up))
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-gate))
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return out, (silu if kind == SILU else gelu) * up


# --- linear


def block_cols(weight_type: int) -> int:
    """Columns are a multiple of it."""
    return 256 if weight_type >= Q4_K else BLOCK_LEN


def columns(weight_type: int, num_blocks: int) -> int:
    """At least so many columns, as the type has them."""
    width = block_cols(weight_type)
    return -(-num_blocks * BLOCK_LEN // width) * width


def random_blocks(weight_type: int, rows: int, cols: int, seed: int = 0) -> Array:
    """A file's bytes of a matrix [rows, bytes]: every bit random but those of the f16 scales, which are near 0.01."""
    random = np.random.default_rng((seed, weight_type))
    num_blocks = rows * cols // block_cols(weight_type)
    block_bytes = quants.quant_shape_to_byte_shape((1, block_cols(weight_type)), kind_of(weight_type))[1]
    raw = random.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    size = (0.01, 0.05) if weight_type in HAS_MIN else (0.01,)
    size = tuple(each / 32 for each in size) if weight_type >= Q4_K else size  # their small scales go up to 63 or 127
    halves = (random.standard_normal((num_blocks, len(size))) * size).astype(np.float16).view(np.uint8)
    where = slice(-2, None) if weight_type == Q6_K else slice(0, halves.shape[1])
    raw[:, where] = halves
    return raw.reshape(rows, -1)


def values_of(weight_type: int, raw: Array) -> Array:
    """[rows, cols] float64, as the `gguf` package reads them."""
    return quants.dequantize(raw, kind_of(weight_type)).astype(np.float64)


def kind_of(weight_type: int) -> GGMLQuantizationType:
    return GGMLQuantizationType[NAMES[weight_type]]


class Weight:
    def __init__(self, library: Library, weight_type: int, rows: int, cols: int) -> None:
        raw = random_blocks(weight_type, rows, cols)
        size = library.so.pyserve_cuda_packed_bytes
        size.restype = ctypes.c_int64
        num_bytes = size(*(ctypes.c_int64(v) for v in (weight_type, rows, cols)))
        whole = np.full(num_bytes + 16, 0xEE, np.uint8)
        self.packed = whole[-pointer(whole) % 16 :][:num_bytes]
        library.call("pyserve_cuda_pack", weight_type, raw, rows, cols, self.packed)
        self.values = values_of(weight_type, raw)
        self.structure = PackedWeight(weight_type, rows, cols, pointer(self.packed))


def linear(
    library: Library,
    weight: Weight,
    x: Rows,
    bias: Array | None = None,
    onto: Array | None = None,
    tile: int | None = None,
) -> tuple[Array, Array]:
    """out [num_rows, rows + 3] with three columns to spare that must stay untouched, and the wanted [num_rows, rows]"""
    num_rows, rows = len(x.f32), weight.structure.rows
    out = np.full((num_rows, rows + 3), 4.0, np.float32)
    if onto is not None:
        out[:, :rows] = onto
    function, rest = ("linear", ()) if tile is None else ("linear_tiled", (tile,))
    call(
        library,
        f"pyserve_cuda_{function}",
        *(weight.structure, x.structure(), bias, out, out.shape[1], num_rows, onto is not None, *rest),
    )
    want = x.dequantised() @ weight.values.T
    return out, want + (0 if bias is None else bias) + (0 if onto is None else onto)


# --- products with float weights, and embeddings


def has_half_product(weight_type: int, cols: int) -> bool:
    """Do the tensor cores make it?"""
    return weight_type in (F16, BF16) and cols % 8 == 0


def rounded(x: Array) -> Array:
    return to_float(to_bits(x, BF16), BF16)


def wanted_product(weight_type: int, bits: Array, x: Array) -> Array:
    """[num_rows, rows] float64. On the tensor cores an activation is the sum of two bf16, an f16 weight too, and what
    the smaller parts have in common is left out.
    """
    values, x = to_float(bits, weight_type), x.astype(np.float64)
    if not has_half_product(weight_type, bits.shape[1]):
        return x @ values.T
    with np.errstate(invalid="ignore"):  # infinity has no smaller part
        high = rounded(x)
        return high @ values.T + rounded(x - high) @ rounded(values).T


def float_product(
    library: Library,
    weight_type: int,
    bits: Array,
    x: Array,
    bias: Array | None = None,
    onto: Array | None = None,
    tile: int | None = None,
) -> tuple[Array, Array]:
    """out [num_rows, rows + 2] with two columns to spare, and the wanted [num_rows, rows]; `bits` as `to_bits`"""
    rows, cols = bits.shape
    inputs = Rows(*x.shape, has_q8=False)
    inputs.f32 = aligned(x)
    out = np.full((len(x), rows + 2), 4.0, np.float32)
    if onto is not None:
        out[:, :rows] = onto
    held = aligned(bits)
    weight = PackedWeight(weight_type, rows, cols, pointer(held))
    function, last = ("linear_float", ()) if tile is None else ("linear_half_tiled", (tile,))
    rest = (bias, out, rows + 2, len(x), onto is not None, *last)
    call(library, f"pyserve_cuda_{function}", weight, inputs.structure(), *rest)
    want = wanted_product(weight_type, bits, x)
    return out, want + (0 if bias is None else bias) + (0 if onto is None else onto)


def aligned(values: Array) -> Array:
    """A copy on 16 bytes, with nothing behind it."""
    whole = np.empty(values.nbytes + 16, np.uint8)
    start = -pointer(whole) % 16
    copy = whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def embed(library: Library, table: PackedWeight, tokens: Sequence[int], scale: float = 1.0) -> Array:
    out = np.full((len(tokens), table.cols), np.nan, np.float32)
    call(library, "pyserve_cuda_embed", table, np.array(tokens, np.int32), len(tokens), scale, out)
    return out


def take_rows(library: Library, x: Array, rows: Sequence[int]) -> Array:
    out = np.full((len(rows), x.shape[1]), np.nan, np.float32)
    call(library, "pyserve_cuda_take_rows", x, x.shape[1], np.array(rows, np.int32), len(rows), out)
    return out


# --- rope and KV write


class RopeCase:
    """Rows at scattered positions of several sequences; `run` gives what is in the pool and in q afterwards."""

    def __init__(
        self,
        *,
        head_dim: int = 64,
        rotary_dim: int = 0,
        page_size: int = 16,
        pool_type: int = F32,
        is_interleaved: bool = False,
        has_norm: bool = False,
        rows: Sequence[tuple[int, int]] = ((0, 0), (0, 1), (1, 33), (2, 17)),
    ) -> None:
        self.num_heads, self.num_kv_heads, self.layer = 3, 1, 1
        self.head_dim, self.rotary_dim, self.page_size = head_dim, rotary_dim or head_dim, page_size
        self.pool_type, self.is_interleaved, self.rows = pool_type, is_interleaved, list(rows)
        width = 40 // page_size + 1
        self.table = np.random.default_rng(1).permutation(3 * width + 2)[: 3 * width].reshape(3, width).astype(np.int32)
        angles = normal(5, 40, self.rotary_dim // 2) * 3
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.q_weight, self.k_weight = (normal(6, head_dim), normal(7, head_dim)) if has_norm else (None, None)
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv = np.stack([normal(8 + 100 * s + p, heads, head_dim) for s, p in rows])

    def run(self, library: Library) -> tuple[Array, Array]:
        """qkv [rows, heads, head_dim] afterwards, pool [pages, layers, 2, kv_heads, page_size, head_dim]; cells that
        were not written hold NaN.
        """
        qkv, num_pages = self.qkv.copy(), self.table.size + 2
        shape = (num_pages, 2, 2, self.num_kv_heads, self.page_size, self.head_dim)
        pool = np.full(shape, np.nan, np.float32) if self.pool_type == F32 else np.full(shape, 0x7FFF, np.uint16)
        positions, sequences = (np.array([row[i] for row in self.rows], np.int32) for i in (1, 0))
        weights = [0 if w is None else pointer(w) for w in (self.q_weight, self.k_weight)]
        call(
            library,
            "pyserve_cuda_rope_kv_write",
            *(qkv, self.num_heads),
            RopeTable(pointer(self.cos), pointer(self.sin), 40, self.rotary_dim, self.is_interleaved),
            HeadNorm(*weights, 1e-6),
            Pool(pointer(pool), self.pool_type, num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim),
            self.layer,
            StepRows(len(self.rows), pointer(positions), pointer(sequences), pointer(self.table), self.table.shape[1]),
        )
        return qkv, pool

    def wanted(self) -> tuple[Array, Array]:
        """float64: q [rows, num_heads, head_dim]; k and v [rows, 2, head_dim] before rounding"""
        x = self.qkv.astype(np.float64)
        q = self._rotated(self._normed(x[:, : self.num_heads], self.q_weight))
        k = self._rotated(self._normed(x[:, self.num_heads : -1], self.k_weight))
        return q, np.concatenate([k, x[:, -1:]], 1)

    def cells(self, pool: Array) -> Array:
        """[rows, 2, head_dim]: what the pool has of each row"""
        found = []
        for s, p in self.rows:
            page = self.table[s, p // self.page_size]
            found.append(pool[page, self.layer, :, 0, p % self.page_size])
        return np.stack(found)

    def rounded(self, cells: Array) -> Array:
        return to_bits(cells, self.pool_type)

    def _normed(self, x: Array, weight: Array | None) -> Array:
        return x if weight is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def _rotated(self, x: Array) -> Array:
        out, half = x.copy(), self.rotary_dim // 2
        positions = [p for _, p in self.rows]
        cos, sin = self.cos[positions][:, None].astype(np.float64), self.sin[positions][:, None].astype(np.float64)
        first = slice(0, 2 * half, 2) if self.is_interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if self.is_interleaved else slice(half, 2 * half)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out


def untouched(pool: Array, case: RopeCase) -> Any:
    """Is every cell NaN that no row owns?"""
    left = pool.copy()
    for s, p in case.rows:
        page = case.table[s, p // case.page_size]
        left[page, case.layer, :, :, p % case.page_size] = np.nan if case.pool_type == F32 else 0x7FFF
    return np.isnan(left).all() if case.pool_type == F32 else (left == 0x7FFF).all()
