"""What the kernels of linear, norm, activation and sample compute, in plain torch: slow, obvious, in any float type.

Quantised products round activations to int8 per block of 32. That rounding is part of the definition, so `quantise`
does it in float32 as the kernel does, bit for bit; what follows runs in the type asked for.
"""

from __future__ import annotations

import torch

BLOCK = 32  # columns that share an activation scale
_ZERO_BELOW = 1e-30  # a block whose largest magnitude is below is taken for zero


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., width] -> q8 int8 [..., width], scale float32 [..., width / 32], sum of q8 int32 [..., width / 32].

    x is about scale * q8. A block with an infinity or a NaN has scale NaN and q8 zero.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))  # [..., blocks, 32]
    largest = blocks.abs().amax(-1)
    is_finite = largest.isfinite()
    is_used = is_finite & (largest >= _ZERO_BELOW)
    limit = torch.tensor(127.0)  # number / tensor would be number * reciprocal, which rounds twice
    inverse = torch.where(is_used, limit / largest, 0.0)
    q8 = torch.where(is_used.unsqueeze(-1), (blocks * inverse.unsqueeze(-1)).round(), 0.0).to(torch.int8)
    scale = torch.where(is_used, largest / limit, torch.where(is_finite, 0.0, torch.nan))
    return q8.flatten(-2), scale, q8.sum(-1, dtype=torch.int32)


def dequantise(q8: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The activations [..., width] that a quantised product multiplies."""
    return q8.to(dtype) * scale.to(dtype).repeat_interleave(BLOCK, -1)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_quantised: bool,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """x [M, K], weight [N, K] as dequantised values -> [M, N].

    `is_quantised`: the weights' type is, so the activations are rounded to int8.
    """
    values = dequantise(*quantise(x)[:2], dtype) if is_quantised else x.to(dtype)
    out = values @ weight.to(dtype).T
    return out if bias is None else out + bias.to(dtype)


def embed(table: torch.Tensor, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table [vocab, width], tokens [T] -> [T, width]."""
    return table[tokens.long()] * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, width] over its root mean square, times weight [width]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def gated_activation(gate_up: torch.Tensor, kind: str = "silu") -> torch.Tensor:
    """gate_up [M, 2 * width]: gate | up -> activation(gate) * up [M, width]. Kinds: silu, gelu_tanh."""
    gate, up = gate_up.chunk(2, -1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation {kind} is not known; known: silu, gelu_tanh")


def sampling_probabilities(
    logits: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probability [vocab] with which `sample_row` picks each token from logits [vocab].

    Truncation is on the untempered distribution, temperature comes last.
    """
    values = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = values.argsort(descending=True, stable=True)  # equal logits: the lower id first
    order = order[values[order] > -torch.inf]
    if temperature <= 0:
        order, temperature = order[:1], 1.0
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        reached = values[order].softmax(0).cumsum(0) >= top_p
        order = order[: int(reached.int().argmax()) + 1] if reached.any() else order
    if min_p > 0:
        best = values[order[0]]
        is_kept = values[order] >= best + torch.tensor(min_p, dtype=torch.float64).log()
        is_kept[0] = True
        order = order[is_kept]
    probabilities = torch.zeros_like(values)
    probabilities[order] = (values[order] / temperature).softmax(0)
    return probabilities


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position): splitmix64 (Steele, Lea, Flood 2014), its top 53 bits."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    return (mix((mix((seed + step) & mask) + (position + 1) * step) & mask) >> 11) * 2.0**-53
