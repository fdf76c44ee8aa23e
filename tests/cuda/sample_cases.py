"""The sampling kernels, called with logits; and what a row's token must be, in float64.

Numpy and ctypes only, so that the sanitizers' children can run it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.cuda.attention_case import Array, call
from tests.cuda.build import Library


def argmax(library: Library, logits: Array, vocab_size: int | None = None) -> Array:
    tokens = np.full(len(logits), -5, np.int32)
    count = vocab_size or logits.shape[1]
    call(library, "pyserve_cuda_argmax", logits, logits.shape[1], count, len(logits), tokens)
    return tokens


@dataclass(frozen=True)
class Draw:
    """One row's sampler."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def draw(library: Library, logits: Array, draws: Sequence[Draw], vocab_size: int | None = None) -> Array:
    tokens = np.full(len(logits), -5, np.int32)
    real = np.array([(each.temperature, each.top_p, each.min_p) for each in draws], np.float32)
    whole = np.array([(each.top_k, each.seed, each.position) for each in draws], np.int64)
    count = vocab_size or logits.shape[1]
    call(library, "pyserve_cuda_draw", logits, logits.shape[1], count, real, whole, len(logits), tokens)
    return tokens


def uniform(seed: int, position: int) -> float:
    """splitmix64's number of (seed, position), its top 53 bits, in [0, 1)"""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    return (mix((mix((seed + step) & mask) + (position + 1) * step) & mask) >> 11) * 2.0**-53


def wanted_token(logits: Array, draw: Draw) -> int:
    """In float64, by sorting. A row without NaN and infinities."""
    x = logits.astype(np.float64)
    order, count = np.argsort(-x, kind="stable"), len(x)
    if draw.temperature <= 0:
        return int(order[0])
    is_sorted = 0 < draw.top_k < count or draw.top_p < 1
    chosen = order[: draw.top_k] if 0 < draw.top_k < count else order
    if draw.top_p < 1:
        mass = np.exp(x[chosen] - x[order[0]])
        chosen = chosen[: 1 + int((np.cumsum(mass) < np.float32(draw.top_p) * mass.sum()).sum())]
    if draw.min_p > 0:
        chosen = chosen[x[chosen] >= x[order[0]] + np.log(min(draw.min_p, 1.0))]
    chosen = chosen if is_sorted else np.sort(chosen)
    upto = np.cumsum(np.exp((x[chosen] - x[order[0]]) / np.float32(draw.temperature)))
    return int(chosen[int((upto <= uniform(draw.seed, draw.position) * upto[-1]).sum())])


class LogitChange(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("row", "token")),
        *((name, ctypes.c_float) for name in ("bias", "count", "repeat", "presence", "frequency")),
        *((name, ctypes.c_int32) for name in ("is_banned", "after")),
    )


def change_logits(
    library: Library, logits: Array, changes: Sequence[LogitChange], picked: Array | None = None
) -> Array:
    """A copy, changed. `picked`: int32, what the changes come after."""
    out, table = logits.copy(), (LogitChange * len(changes))(*changes)
    call(library, "pyserve_cuda_change_logits", out, out.shape[1], table, len(changes), picked)
    return out


def follow(library: Library, tokens: Sequence[int], picked: Sequence[int]) -> list[int]:
    """Tokens of a step, with those that were picked on the device before it."""
    out = np.array(tokens, np.int32)
    call(library, "pyserve_cuda_follow", out, len(out), np.array(picked, np.int32))
    return list(out.tolist())
