"""What each op returns, in shapes and dtypes alone: lets torch trace and check the ops without running them."""

from __future__ import annotations

import torch


def register() -> None:
    """Once, after the extension is loaded."""
    torch.library.register_fake("pyserve::linear", _linear)
    torch.library.register_fake("pyserve::embed", _embed)
    torch.library.register_fake("pyserve::rms_norm", _rms_norm)
    torch.library.register_fake("pyserve::gated_activation", _gated_activation)
    torch.library.register_fake("pyserve::attention", _attention)
    torch.library.register_fake("pyserve::rope_kv_write", _rope_kv_write)
    torch.library.register_fake("pyserve::page_copy", _page_copy)
    torch.library.register_fake("pyserve::comb_table", _comb_table)


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    type: int,
    rows: int,
    cols: int,
    bias: torch.Tensor | None = None,
    num_shares: int = 1,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], rows))


def _embed(
    tokens: torch.Tensor, packed: torch.Tensor, type: int, rows: int, cols: int, scale: float = 1.0
) -> torch.Tensor:
    return tokens.new_empty((tokens.shape[0], cols), dtype=torch.float32)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def _gated_activation(gate_up: torch.Tensor, kind: int) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _attention(
    qkv: torch.Tensor,
    num_heads: int,
    kv: torch.Tensor,
    layer: int,
    scale: float,
    softcap: float,
    window: int,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    page_table: torch.Tensor,
    num_shares: int = 1,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads * kv.shape[5]))


def _rope_kv_write(*arguments: object, **options: object) -> None:
    return None


def _page_copy(pool: torch.Tensor, host: torch.Tensor, combs: torch.Tensor, to_host: bool) -> None:
    return None


def _comb_table(pages: torch.Tensor, first_offset: int) -> torch.Tensor:
    return pages.new_empty((torch.library.get_ctx().new_dynamic_size(), 5))
