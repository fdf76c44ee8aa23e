"""Rope, KV writes, attention and page copies in plain torch: slow, in any float dtype, and what the kernels are
tested against.

Shapes as in csrc/ops.h. The pool is [pages, layers, 2, kv_heads, page_size, head_dim]; T rows, S sequences; qkv [T,
(num_heads + 2 * num_kv_heads) * head_dim].
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotated copy of x [T, heads, head_dim]; cos and sin [T, rotary_dim / 2], the rows of the tables at the
    positions.
    """
    half = cos.shape[1]
    out = x.clone()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first], x[..., second]
    c, s = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [T, heads, head_dim] over its root mean square by head, times weight [head_dim]; unchanged without a weight."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def split(qkv: torch.Tensor, num_heads: int, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]"""
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def cells(
    page_table: torch.Tensor, sequence: int, positions: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and place in the page of each position of a sequence."""
    return page_table[sequence, positions // page_size].long(), (positions % page_size).long()


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """k and v [T, kv_heads, head_dim] into the pool, rounded to its dtype."""
    for row in range(len(positions)):
        page, place = cells(page_table, int(sequences[row]), positions[row], pool.shape[4])
        pool[page, layer, 0, :, place] = k[row].to(pool.dtype)
        pool[page, layer, 1, :, place] = v[row].to(pool.dtype)


def attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    page_table: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """q [T, num_heads, head_dim] -> [T, num_heads, head_dim], computed in q's dtype."""
    rows = []
    group = q.shape[1] // pool.shape[3]
    for row in range(len(positions)):
        last = int(positions[row])
        first = max(0, last - window + 1) if window else 0
        page, place = cells(page_table, int(sequences[row]), torch.arange(first, last + 1), pool.shape[4])
        keys, values = (
            pool[page, layer, i, :, place].to(q.dtype).repeat_interleave(group, dim=1) for i in (0, 1)
        )  # [n, num_heads, head_dim]
        scores = torch.einsum("hd,nhd->hn", q[row], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(rows)


def page_copy(pool: torch.Tensor, host: torch.Tensor, pages: list[int], to_host: bool) -> None:
    """Page i of `pages` <-> place i of host, uint8 [n * page_bytes]."""
    size = pool[0].numel() * pool.element_size()
    for i, page in enumerate(pages):
        in_pool, in_host = pool[page].reshape(-1).view(torch.uint8), host[i * size : (i + 1) * size]
        (in_host if to_host else in_pool).copy_(in_pool if to_host else in_host)
