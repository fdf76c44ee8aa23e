"""The frequencies of rotary position embeddings and the tables of their cosines and sines.

Plain: Su et al., RoFormer, arXiv 2104.09864. linear: positions divided by a factor. yarn: Peng et al.,
arXiv 2309.00071. llama3: by wavelength, as published with Llama 3.1. Everything is computed in float64; a table is
rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from .spec import RopeSpec

Floats = NDArray[np.float64]
ROWS_AT_ONCE = 8192  # bounds the float64 copies


def frequencies(rope: RopeSpec) -> Floats:
    """Radians that each pair turns per position: f64 [rotary_dim / 2]."""
    plain: Floats = rope.base ** (-np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, plain)
    return plain


def yarn_attention_factor(factor: float) -> float:
    """What cos and sin are multiplied by unless the model says otherwise: the paper's fit of a temperature."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def tables(rope: RopeSpec, pair_factors: Floats | None, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 .. max_positions - 1: two f32 [max_positions, rotary_dim / 2].

    `pair_factors` [rotary_dim / 2] divide the frequencies: GGUF files carry llama3 scaling that way.
    """
    turns = frequencies(rope) if pair_factors is None else frequencies(rope) / pair_factors
    cos = torch.empty(max_positions, turns.size)
    sin = torch.empty(max_positions, turns.size)
    for start in range(0, max_positions, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, max_positions)
        angles = np.arange(start, end, dtype=np.float64)[:, None] * turns
        cos[start:end] = torch.from_numpy(np.cos(angles) * rope.attention_factor)
        sin[start:end] = torch.from_numpy(np.sin(angles) * rope.attention_factor)
    return cos, sin


def _llama3(rope: RopeSpec, plain: Floats) -> Floats:
    """Long waves divided by the factor, short ones left alone, a smooth step between."""
    turns_in_context = rope.original_context_len * plain / (2 * math.pi)
    smooth = (turns_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeSpec, plain: Floats) -> Floats:
    """A linear ramp over the pairs, from left alone to fully interpolated."""
    low, high = _yarn_pair(rope, rope.beta_fast), _yarn_pair(rope, rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = np.clip((np.arange(plain.size) - low) / max(high - low, 0.001), 0.0, 1.0)
    mixed: Floats = plain / rope.factor * ramp + plain * (1 - ramp)
    return mixed


def _yarn_pair(rope: RopeSpec, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    return rope.rotary_dim * math.log(rope.original_context_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))
