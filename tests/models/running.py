"""Runs a model's program over one sequence, chunk by chunk, and returns the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pyserve.kv_store import KV_TYPES, resolve_kv_type
from pyserve.models.load import build_program
from pyserve.models.source import open_model
from pyserve.ops import CpuDevice
from pyserve.ops.kv import allocate_pool
from pyserve.ops.program import Program, StepBatch

PAGE_SIZE = 16
MAX_TOKENS = 64


class Running:
    """One model with a pool for one sequence, whose pages are not in order."""

    def __init__(self, path: Path, max_positions: int = 256, num_threads: int = 2, kv_type: str = "f32") -> None:
        source, self.spec = open_model(path)
        self.program: Program = build_program(
            source,
            self.spec,
            max_tokens=MAX_TOKENS,
            max_samples=MAX_TOKENS,
            max_positions=max_positions,
            num_threads=num_threads,
        )
        dtype = KV_TYPES[resolve_kv_type(kv_type, self.spec.head_dim, CpuDevice())]
        num_pages = -(-max_positions // PAGE_SIZE)
        spec = self.spec
        self.kv = allocate_pool(num_pages, spec.num_layers, spec.num_kv_heads, PAGE_SIZE, spec.head_dim, dtype)
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
        self.page_table = order.to(torch.int32)[None]  # [1, pages]
        self.position = 0

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """The next tokens of the sequence; their logits, f32 [tokens, vocab]."""
        count = len(tokens)
        rows = torch.arange(count, dtype=torch.int32)
        batch = StepBatch(
            tokens=torch.tensor(tokens, dtype=torch.int32),
            positions=rows + self.position,
            sequences=torch.zeros(count, dtype=torch.int32),
            page_table=self.page_table,
            sample_rows=rows,
        )
        self.position += count
        return self.program.run(batch, self.kv).clone()

    def logits(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Logits of every position, f32 [tokens, vocab]: first `chunks`, then token by token."""
        found, at = [], 0
        for count in [*chunks, *[1] * (len(tokens) - sum(chunks))]:
            found.append(self.step(tokens[at : at + count]))
            at += count
        return torch.cat(found)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most probable continuation."""
        token = int(self.logits(prompt, [len(prompt)])[-1].argmax())
        found = [token]
        while len(found) < count:
            token = int(self.step([token])[-1].argmax())
            found.append(token)
        return found
