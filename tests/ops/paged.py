"""Sequences laid out in a pool, for the tests of what reads and writes one."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Paged:
    """Sequences of given lengths on shuffled pages of a pool in which every cell that nobody owns is NaN."""

    pool: torch.Tensor  # [pages, layers, 2, kv_heads, page_size, head_dim]
    page_table: torch.Tensor  # [S, width]; entries past a sequence's last page are no page at all
    keys: list[torch.Tensor]  # a sequence's [layers, 2, kv_heads, length, head_dim]

    @staticmethod
    def build(
        contents: list[torch.Tensor], page_size: int, dtype: torch.dtype, *, seed: int = 0, spare_pages: int = 3
    ) -> Paged:
        """contents: a sequence's K and V [layers, 2, kv_heads, length, head_dim]."""
        counts = [-(-content.shape[3] // page_size) for content in contents]
        layers, _, kv_heads, _, head_dim = contents[0].shape
        order = torch.randperm(sum(counts) + spare_pages, generator=torch.Generator().manual_seed(seed))
        pool = torch.full((len(order), layers, 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
        table = torch.full((len(contents), max(counts)), -1, dtype=torch.int32)
        next_page = 0
        for i, content in enumerate(contents):
            for j in range(counts[i]):
                page = int(order[next_page])
                next_page += 1
                table[i, j] = page
                piece = content[:, :, :, j * page_size : (j + 1) * page_size]
                pool[page, :, :, :, : piece.shape[3]] = piece.to(dtype)
        return Paged(pool, table, contents)


def random_contents(lens: list[int], layers: int, kv_heads: int, head_dim: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layers, 2, kv_heads, length, head_dim, generator=generator) for length in lens]
