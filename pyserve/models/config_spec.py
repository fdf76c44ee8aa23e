"""The spec of a Hugging Face folder, from its config.json. Fields left out have the defaults of the architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .fields import MAX_COUNT, Fields
from .files import shown
from .folder import Folder
from .rope import yarn_attention_factor
from .spec import Activation, ModelSpec, RopeSpec

QKV = frozenset({"attn_q", "attn_k", "attn_v"})
MLP = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture says where config.json is silent; None: computed from other fields."""

    architecture: str
    context_len: int
    num_kv_heads: int | None = None
    head_dim: int | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", 2048),
    "MistralForCausalLM": Family("mistral", 131072, num_kv_heads=8),
    "Qwen2ForCausalLM": Family("qwen2", 32768, num_kv_heads=32),
    "Qwen3ForCausalLM": Family("qwen3", 32768, num_kv_heads=32, head_dim=128),
}


def config_spec(folder: Folder) -> ModelSpec:
    """Raises ModelFileError for what cannot be served or contradicts itself."""
    fields = Fields(folder.path / "config.json", folder.config)
    family = _family(fields)
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > len(folder.tensors):
        fields.fail("num_hidden_layers", f"is {num_layers}, but the folder holds {len(folder.tensors)} tensors")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    rope = _rope(fields, head_dim, fields.integer("max_position_embeddings", family.context_len))
    return ModelSpec(
        architecture=family.architecture,
        name=folder.path.resolve().name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", family.num_kv_heads or num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        context_len=_context_len(fields, family, rope),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(fields, family, num_layers),
        attention_scale=1 / math.sqrt(head_dim),
        activation=_activation(fields),
        biases=_biases(fields, family),
        is_head_normed=family.architecture == "qwen3",
        is_tied=fields.flag("tie_word_embeddings", False),
        num_parameters=sum(tensor.num_values for tensor in folder.tensors.values()),
        file_type=_file_type(folder),
        size_bytes=folder.size_bytes,
    )


def _family(fields: Fields) -> Family:
    architectures = fields.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str):
        fields.fail("architectures", "must be a list with the name of the architecture")
    if name not in FAMILIES:
        fields.fail("architectures", f"names {shown(name)}, which is not supported ({', '.join(FAMILIES)} are)")
    if fields.get("quantization_config") is not None:
        fields.fail("quantization_config", "is set: quantised folders are not supported (GGUF files are)")
    return FAMILIES[name]


def _activation(fields: Fields) -> Activation:
    name = fields.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        fields.fail("hidden_act", f"{shown(name)} is not supported ({', '.join(ACTIVATIONS)} are)")
    return ACTIVATIONS[name]


def _biases(fields: Fields, family: Family) -> frozenset[str]:
    if family.architecture == "qwen2":
        return QKV
    if family.architecture == "mistral":
        return frozenset()
    attention = QKV | {"attn_output"} if fields.flag("attention_bias", False) else frozenset()
    return attention | (MLP if family.architecture == "llama" and fields.flag("mlp_bias", False) else frozenset())


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Mistral: one window for all layers, unless it is null. Qwen: only if switched on, and then in the layers that
    `layer_types` names or that follow the first `max_window_layers`."""
    if family.architecture == "llama":
        return (0,) * num_layers
    window = 0 if _is_null(fields, "sliding_window") else fields.integer("sliding_window", 4096)
    if family.architecture == "mistral":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        return (0,) * num_layers
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        fields.fail("layer_types", f"must be a list of {num_layers} names")
    for kind in layer_types:
        if kind not in ("sliding_attention", "full_attention"):
            fields.fail("layer_types", f"names {shown(kind)}, which is not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


def _is_null(fields: Fields, key: str) -> bool:
    return key in fields.values and fields.values[key] is None


def _rope(fields: Fields, head_dim: int, max_positions: int) -> RopeSpec:
    """From `rope_parameters` (with rope_theta inside) or the older `rope_scaling` and `rope_theta`."""
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    stated = fields.get(key) or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        fields.fail(key, "must be an object without further objects in it")
    inner = Fields(fields.path, {f"{key}.{name}": value for name, value in stated.items()}, f"{key}.")
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0:
        fields.fail("partial_rotary_factor", f"is {share}, which is not supported")
    rope = RopeSpec(inner.number("rope_theta", fields.number("rope_theta", 10000.0)), head_dim, is_interleaved=False)
    scaling = inner.text("rope_type", inner.text("type", "default"))
    if scaling == "default":
        return rope
    if scaling not in ("linear", "llama3", "yarn"):
        inner.fail("rope_type", f"{shown(scaling)} is not supported (default, linear, llama3, yarn are)")
    original_len = inner.integer("original_max_position_embeddings", max_positions)
    original_len = fields.integer("original_max_position_embeddings", original_len)
    if scaling == "yarn":
        return _yarn(inner, replace(rope, scaling="yarn", original_context_len=original_len), max_positions)
    rope = replace(rope, scaling=scaling, factor=inner.number("factor"), original_context_len=original_len)
    if scaling == "linear":
        return rope
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        inner.fail("low_freq_factor", f"is {low}, not below high_freq_factor {high}")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(inner: Fields, rope: RopeSpec, max_positions: int) -> RopeSpec:
    factor = inner.number("factor", max_positions / rope.original_context_len)
    attention_factor = yarn_attention_factor(factor)
    mscale, mscale_all = inner.get("mscale"), inner.get("mscale_all_dim")
    if mscale and mscale_all:
        attention_factor = _scaled(factor, inner.number("mscale")) / _scaled(factor, inner.number("mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        is_truncated=inner.flag("truncate", True),
        attention_factor=inner.number("attention_factor", attention_factor),
    )


def _scaled(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _context_len(fields: Fields, family: Family, rope: RopeSpec) -> int:
    """Tokens. Folders that are stretched by linear or yarn state the length before, after, or both."""
    stated = fields.integer("max_position_embeddings", family.context_len)
    if rope.scaling in ("linear", "yarn"):
        return min(max(stated, int(rope.original_context_len * rope.factor)), MAX_COUNT)
    return stated


def _file_type(folder: Folder) -> str:
    counts: dict[str, int] = {}
    for tensor in folder.tensors.values():
        counts[tensor.type] = counts.get(tensor.type, 0) + tensor.num_values
    return max(counts, key=lambda name: counts[name]) if counts else ""
