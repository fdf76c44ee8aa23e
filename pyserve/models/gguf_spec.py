"""The spec of a GGUF model, from its metadata and the shapes of its tensors."""

from __future__ import annotations

import math
from dataclasses import replace

from gguf.constants import LlamaFileType

from .fields import Fields
from .files import fail, shown
from .gguf import GgufFile
from .rope import yarn_attention_factor
from .spec import ROPE_FACTORS, ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PRODUCTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# Keys of these architectures that would change the result and are not implemented.
UNSUPPORTED = ("expert_count", "attention.sliding_window_pattern", "attention.max_alibi_bias", "attention.clamp_kqv")


def gguf_spec(file: GgufFile) -> ModelSpec:
    """Raises ModelFileError for what cannot be served or contradicts itself."""
    general = Fields(file.path, file.metadata, "general.")
    architecture = general.text("architecture")
    if architecture not in ARCHITECTURES:
        fail(file.path, f"architecture {shown(architecture)} is not supported ({', '.join(ARCHITECTURES)} are)")
    fields = Fields(file.path, file.metadata, f"{architecture}.")
    _refuse_unsupported(fields)
    num_layers = fields.integer("block_count")
    if num_layers > len(file.tensors):
        fields.fail("block_count", f"is {num_layers}, but the file holds {len(file.tensors)} tensors")
    hidden_size, num_heads = fields.integer("embedding_length"), _same_in_all_layers(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        fields.fail("attention.value_length", "differs from the key length, which is not supported")
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    return ModelSpec(
        architecture=architecture,
        name=general.text("name", file.path.stem),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_same_in_all_layers(fields, "feed_forward_length"),
        vocab_size=_vocab_size(file, fields),
        context_len=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, head_dim, is_interleaved=architecture == "llama"),
        windows=(window,) * num_layers,
        attention_scale=fields.number("attention.scale", 1 / math.sqrt(head_dim)),
        activation="silu",
        biases=frozenset(name for name in PRODUCTS if f"blk.0.{name}.bias" in file.tensors),
        is_head_normed=architecture == "qwen3",
        is_tied="output.weight" not in file.tensors,
        num_parameters=sum(tensor.num_values for name, tensor in file.tensors.items() if name != ROPE_FACTORS),
        file_type=_file_type(file, general),
        size_bytes=file.size_bytes,
    )


def _refuse_unsupported(fields: Fields) -> None:
    for key in UNSUPPORTED:
        if fields.get(key):
            fields.fail(key, f"is {shown(fields.get(key))}: such models are not supported")
    if fields.get("attention.causal") is False:
        fields.fail("attention.causal", "is false: embedding models are not supported")
    if fields.values.get("split.count") not in (None, 0, 1):
        fail(fields.path, "one part of a split GGUF file; merge the parts with llama-gguf-split --merge first")


def _same_in_all_layers(fields: Fields, key: str, default: int | None = None) -> int:
    """A count that the format also allows as one value per layer, which must then all be the same."""
    value = fields.get(key)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if not value or any(entry != value[0] for entry in value):
        fields.fail(key, "differs between layers, which is not supported")
    return Fields(fields.path, {fields.prefix + key: value[0]}, fields.prefix).integer(key)


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    """Rows of the embedding table; the token list and the stated size must agree with it."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        fail(file.path, "tensor 'token_embd.weight' is missing")
    vocab_size = table.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        fail(file.path, f"tokenizer.ggml.tokens has {len(tokens)} entries for {vocab_size} rows of 'token_embd.weight'")
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        fields.fail("vocab_size", f"is {fields.get('vocab_size')}, but 'token_embd.weight' has {vocab_size} rows")
    return vocab_size


def _rope(fields: Fields, head_dim: int, is_interleaved: bool) -> RopeSpec:
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        fields.fail("rope.dimension_count", f"is {rotary_dim}, which is odd or more than the head's {head_dim}")
    rope = RopeSpec(fields.number("rope.freq_base", 10000.0), rotary_dim, is_interleaved)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    scaling = fields.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if scaling == "none":
        return rope
    if scaling == "linear":
        return replace(rope, scaling="linear", factor=factor)
    if scaling != "yarn":
        fields.fail("rope.scaling.type", f"{shown(scaling)} is not supported (none, linear, yarn are)")
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        fields.fail("rope.scaling.yarn_ext_factor", "other than 1 is not supported")
    own_factor = fields.number("rope.scaling.attn_factor", 1.0) * fields.number("rope.scaling.yarn_attn_factor", 1.0)
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        original_context_len=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=own_factor * yarn_attention_factor(factor),
    )


def _file_type(file: GgufFile, general: Fields) -> str:
    """As people name the file: Q4_K_M. Without the field, the type that most values have."""
    stated = general.integer("file_type", 1 << 20, minimum=0)
    try:
        return LlamaFileType(stated).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        counts: dict[str, int] = {}
        for tensor in file.tensors.values():
            counts[tensor.type] = counts.get(tensor.type, 0) + tensor.num_values
        return max(counts, key=lambda name: counts[name])
