"""The Llama family as a program of kernel calls: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 differ by flags only.

A step, for the rows of all sequences together; x is the residual stream:

    embed -> x
    each layer:  norm(x) -> h;  q, k, v of h in one product -> qkv;  rope, k and v to the pool;  attention -> mixed
                 x += output(mixed);  norm(x) -> h;  gate, up of h in one product;  silu(gate) * up -> inner
                 x += down(inner)
    rows that sample: take -> norm -> head -> logits
"""

from __future__ import annotations

import torch

from ..ops.program import AttentionShape, Program, Register, RopeTable
from ..ops.weights import PackedWeight
from .rope import tables
from .spec import ModelSpec
from .weights import Weights

QKV = ("attn_q", "attn_k", "attn_v")
GATE_UP = ("ffn_gate", "ffn_up")


def build(spec: ModelSpec, weights: Weights, program: Program, max_positions: int) -> None:
    """Fill `program` with the model's step. The rope tables get `max_positions` rows, at most the
    model's context.
    """
    _Builder(spec, weights, program, max_positions).build()


class _Builder:
    def __init__(self, spec: ModelSpec, weights: Weights, program: Program, max_positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.program = program
        cos, sin = tables(spec.rope, weights.rope_factors(), min(max_positions, spec.context_len))
        self.rope = RopeTable(cos, sin, spec.rope.is_interleaved)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.x = program.buffer(spec.hidden_size)
        self.h = program.buffer(spec.hidden_size)
        self.qkv = program.buffer(q_size + 2 * kv_size)
        self.mixed = program.buffer(q_size)
        self.gate_up = program.buffer(2 * spec.intermediate_size)
        self.inner = program.buffer(spec.intermediate_size)

    def build(self) -> None:
        table = self.weights.packed("token_embd.weight")
        self.program.embed(table, self.x)
        for layer in range(self.spec.num_layers):
            self._attention(layer)
            self._feed_forward(layer)
        self._head(table)

    def _attention(self, layer: int) -> None:
        spec, block = self.spec, f"blk.{layer}."
        shape = AttentionShape(layer, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._norm(self.x, f"{block}attn_norm", self.h)
        self._linear(self.h, [block + name for name in QKV], self.qkv)
        self.program.rope_kv_write(
            self.qkv,
            shape,
            self.rope,
            q_norm=self.weights.vector(f"{block}attn_q_norm.weight") if spec.is_head_normed else None,
            k_norm=self.weights.vector(f"{block}attn_k_norm.weight") if spec.is_head_normed else None,
            norm_eps=spec.norm_eps if spec.is_head_normed else 0.0,
        )
        window = spec.windows[layer]
        self.program.attention(self.qkv, self.mixed, shape, scale=spec.attention_scale, window=window)
        self._linear(self.mixed, [f"{block}attn_output"], self.x, accumulate=True)

    def _feed_forward(self, layer: int) -> None:
        block = f"blk.{layer}."
        self._norm(self.x, f"{block}ffn_norm", self.h)
        self._linear(self.h, [block + name for name in GATE_UP], self.gate_up)
        self.program.gated_activation(self.gate_up, self.inner, self.spec.activation)
        self._linear(self.inner, [f"{block}ffn_down"], self.x, accumulate=True)

    def _head(self, table: PackedWeight) -> None:
        """The head for the rows that sample alone; a tied head is the embedding table, which is held once."""
        last, normed = self.program.buffer(self.spec.hidden_size), self.program.buffer(self.spec.hidden_size)
        logits = self.program.buffer(self.spec.vocab_size)
        self.program.take_rows(self.x, last)
        self._norm(last, "output_norm", normed)
        self.program.linear(normed, [table if self.spec.is_tied else self.weights.packed("output.weight")], logits)
        self.program.set_logits(logits)

    def _norm(self, x: Register, name: str, out: Register) -> None:
        self.program.rms_norm(x, self.weights.vector(f"{name}.weight"), self.spec.norm_eps, out)

    def _linear(self, x: Register, names: list[str], out: Register, accumulate: bool = False) -> None:
        biases: list[torch.Tensor | None] = [self.weights.vector_if_there(f"{name}.bias") for name in names]
        packed = [self.weights.packed(f"{name}.weight") for name in names]
        self.program.linear(x, packed, out, biases=biases, accumulate=accumulate)
