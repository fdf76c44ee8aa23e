"""What a model is, in numbers: everything about it that does not need its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ROPE_FACTORS = "rope_freqs.weight"  # GGUF: what llama3 scaling divides each pair's frequency by
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding and how it is stretched: `scaling` is none, linear, llama3 or yarn."""

    base: float
    rotary_dim: int  # leading columns of each head that are rotated
    is_interleaved: bool  # pairs (2i, 2i + 1), as GGUF's llama files store q and k; else (i, i + rotary_dim / 2)
    scaling: str = "none"
    factor: float = 1.0
    original_context_len: int = 0  # tokens the model was first trained on; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a pair is left alone
    beta_slow: float = 1.0  # and below which it is fully interpolated
    is_truncated: bool = True  # yarn: the two bounds are rounded to whole pairs
    attention_factor: float = 1.0  # cos and sin are multiplied by it


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family. Sizes in values, lengths in tokens."""

    architecture: str  # llama, mistral, qwen2, qwen3
    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]  # of each layer: positions that a row sees, its own included; 0: all
    attention_scale: float
    activation: Activation
    biases: frozenset[str]  # the products of a layer that have one: attn_q, attn_k, ..., ffn_down
    is_head_normed: bool  # q and k of each head are normed before rope
    is_tied: bool  # the output head is the embedding table
    num_parameters: int = 0
    file_type: str = ""  # how most weights are stored, as people name it: Q4_1, BF16
    size_bytes: int = 0  # of the file or files

    @property
    def sliding_window(self) -> int:
        """The window of the layers that have one; 0 when none has."""
        return max(self.windows)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model under its GGUF name, with its shape [outputs, inputs] or [values]."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocab_size, self.hidden_size),
            "output_norm.weight": (self.hidden_size,),
        }
        if not self.is_tied:
            shapes["output.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            for name, shape in self._layer_shapes().items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
                if name in self.biases:
                    shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, q_size, kv_size = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        if self.is_head_normed:
            norms |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
        return norms | {
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate": (self.intermediate_size, hidden),
            "ffn_up": (self.intermediate_size, hidden),
            "ffn_down": (hidden, self.intermediate_size),
        }
