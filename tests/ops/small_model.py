"""A two-layer model with random weights: as a program, and the same step op by op."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pyserve.ops import AttentionShape, PackedWeight, Program, RopeTable, StepBatch, allocate_pool, pack
from tests.ops.paged import ints
from tests.ops.weight_cases import random_matrix

EPS = 1e-5


@dataclass
class SmallModel:
    """`types`: the weight types of attention products, of the gated ones, and of the table, which is the head too."""

    types: tuple[str, str, str] = ("F32", "F32", "F32")
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    width: int = 64
    inner: int = 96
    vocab: int = 100
    num_layers: int = 2
    max_positions: int = 300
    is_head_normed: bool = False
    weights: dict[str, PackedWeight] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # float64, what the packed weights mean

    def __post_init__(self) -> None:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self._add("table", self.types[2], self.vocab, self.width)
        for i in range(self.num_layers):
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                self._add(f"{name}{i}", self.types[0], rows, self.width)
            self._add(f"o{i}", self.types[0], self.width, q)
            self._add(f"gate{i}", self.types[1], self.inner, self.width)
            self._add(f"up{i}", self.types[1], self.inner, self.width)
            self._add(f"down{i}", self.types[1], self.width, self.inner)
        angles = torch.arange(self.max_positions)[:, None] * torch.exp(-torch.arange(self.head_dim // 2) / 2.0)
        self.rope = RopeTable(angles.cos().contiguous(), angles.sin().contiguous(), True)
        generator = torch.Generator().manual_seed(1)
        self.norm = torch.rand(self.width, generator=generator) + 0.5
        self.head_norm = torch.rand(self.head_dim, generator=generator) + 0.5 if self.is_head_normed else None
        self.bias = torch.randn(kv, generator=generator) * 0.1

    def _add(self, name: str, type_name: str, rows: int, cols: int) -> None:
        raw, values = random_matrix(type_name, rows, cols, seed=len(self.weights))
        if type_name == "F32":
            scaled = (values / cols**0.5).float()
            raw, values = scaled, scaled.double()
        self.weights[name] = pack(type_name, raw, rows, cols)
        self.values[name] = values

    def shape(self, layer: int) -> AttentionShape:
        return AttentionShape(layer, self.num_heads, self.num_kv_heads, self.head_dim)

    def pool(self, num_pages: int, page_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return allocate_pool(num_pages, self.num_layers, self.num_kv_heads, page_size, self.head_dim, dtype)

    def program(self, *, num_threads: int = 1, max_tokens: int = 160, max_samples: int = 8) -> Program:
        program = Program(max_tokens=max_tokens, max_samples=max_samples, num_threads=num_threads)
        x, h = program.buffer(self.width), program.buffer(self.width)
        qkv, mixed = program.buffer(self.shape(0).qkv_width), program.buffer(self.num_heads * self.head_dim)
        gate_up, inner = program.buffer(2 * self.inner), program.buffer(self.inner)
        program.embed(self.weights["table"], x, 2.0)
        for i in range(self.num_layers):
            program.rms_norm(x, self.norm, EPS, h)
            names, biases = [f"q{i}", f"k{i}", f"v{i}"], [None, self.bias, None]
            program.linear(h, [self.weights[name] for name in names], qkv, biases=biases)
            norms = {"q_norm": self.head_norm, "k_norm": self.head_norm}
            program.rope_kv_write(qkv, self.shape(i), self.rope, norm_eps=EPS, **norms)
            program.attention(qkv, mixed, self.shape(i), scale=self.head_dim**-0.5, window=self.window)
            program.linear(mixed, [self.weights[f"o{i}"]], x, accumulate=True)
            program.rms_norm(x, self.norm, EPS, h)
            program.linear(h, [self.weights[f"gate{i}"], self.weights[f"up{i}"]], gate_up)
            program.gated_activation(gate_up, inner)
            program.linear(inner, [self.weights[f"down{i}"]], x, accumulate=True)
        last, normed = program.buffer(self.width), program.buffer(self.width)
        logits = program.buffer(self.vocab)
        program.take_rows(x, last)
        program.rms_norm(last, self.norm, EPS, normed)
        program.linear(normed, [self.weights["table"]], logits)
        program.set_logits(logits)
        return program

    def _linear(self, x: torch.Tensor, name: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.weights[name]
        return torch.ops.pyserve.linear(x, weight.data, weight.type_id, weight.rows, weight.cols, bias)

    def op_by_op(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """What the program computes, one op at a time."""
        ops, table = torch.ops.pyserve, self.weights["table"]
        rows = (batch.positions, batch.sequences, batch.page_table)
        x = ops.embed(batch.tokens, table.data, table.type_id, table.rows, table.cols, 2.0)
        for i in range(self.num_layers):
            h = ops.rms_norm(x, self.norm, EPS)
            parts = [self._linear(h, f"q{i}"), self._linear(h, f"k{i}", self.bias), self._linear(h, f"v{i}")]
            qkv = torch.cat(parts, dim=1)
            norms = (self.head_norm, self.head_norm, EPS)
            ops.rope_kv_write(qkv, self.num_heads, self.rope.cos, self.rope.sin, True, *norms, kv, i, *rows)
            mixed = ops.attention(qkv, self.num_heads, kv, i, self.head_dim**-0.5, 0.0, self.window, *rows)
            x = x + self._linear(mixed, f"o{i}")
            h = ops.rms_norm(x, self.norm, EPS)
            gate_up = torch.cat([self._linear(h, f"gate{i}"), self._linear(h, f"up{i}")], dim=1)
            x = x + self._linear(ops.gated_activation(gate_up, 0), f"down{i}")
        return self._linear(ops.rms_norm(x[batch.sample_rows.long()], self.norm, EPS), "table")


def batch_of(
    pieces: list[tuple[int, int, list[int]]], page_table: torch.Tensor, sample_rows: list[int] | None = None
) -> StepBatch:
    """pieces: (sequence, first position, tokens). Each piece's last row is sampled unless `sample_rows` says which."""
    tokens = [token for _, _, piece in pieces for token in piece]
    positions = [start + i for _, start, piece in pieces for i in range(len(piece))]
    sequences = [sequence for sequence, _, piece in pieces for _ in piece]
    ends, end = [], -1
    for _, _, piece in pieces:
        end += len(piece)
        ends.append(end)
    wanted = ends if sample_rows is None else sample_rows
    return StepBatch(ints(tokens), ints(positions), ints(sequences), page_table, ints(wanted))
