"""Writes small random models, as GGUF files and as Hugging Face folders, for tests and for trying things by hand.

    python tools/make_tiny_model.py tiny.gguf --arch qwen2 --type Q8_0
    python tools/make_tiny_model.py tiny-folder --arch llama

The same shape and seed give the same values in both forms. The tokenizer is byte-level BPE with a few merges and ChatML
tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from numpy.typing import NDArray
from safetensors.torch import save_file

Arrays = dict[str, NDArray[np.float32]]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGED = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri"
FOLDER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Shape:
    """A small model's sizes; `biases` names the products that have one."""

    arch: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    vocab: int = 0  # 0: as many as the tokenizer has; more are filled up with unused tokens
    context: int = 2048
    tied: bool = True
    biases: tuple[str, ...] = ()
    seed: int = 0

    @property
    def vocab_size(self) -> int:
        return max(self.vocab, len(vocabulary(0)[0]))


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE of at least `size` tokens: bytes, merges, special tokens, unused ones."""
    letters = _byte_letters()
    merges = [f"{pair[0]} {pair[1]}" for pair in MERGED.split()] + ["\u0120 t", "\u0120 a", "\u0120t he", "an d"]
    tokens = letters + [merge.replace(" ", "") for merge in merges] + list(SPECIAL_TOKENS)
    return tokens + [f"<|unused_{index}|>" for index in range(size - len(tokens))], merges


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def random_tensors(shape: Shape) -> Arrays:
    """Values under GGUF names, q and k in the order of a Hugging Face folder: f32 [outputs, inputs] or [values]."""
    rng = np.random.default_rng(shape.seed)
    tensors: Arrays = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        if name.rpartition(".")[2] in shape.biases:
            tensors[f"{name}.bias"] = rng.normal(0, 0.5, rows).astype(np.float32)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = rng.normal(1, 0.1, width).astype(np.float32)

    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrix("token_embd", shape.vocab_size, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm", shape.hidden)
        matrix(f"{block}attn_q", q_size, shape.hidden)
        matrix(f"{block}attn_k", kv_size, shape.hidden)
        matrix(f"{block}attn_v", kv_size, shape.hidden)
        matrix(f"{block}attn_output", shape.hidden, q_size)
        if shape.arch == "qwen3":
            norm(f"{block}attn_q_norm", shape.head_dim)
            norm(f"{block}attn_k_norm", shape.head_dim)
        norm(f"{block}ffn_norm", shape.hidden)
        matrix(f"{block}ffn_gate", shape.intermediate, shape.hidden)
        matrix(f"{block}ffn_up", shape.intermediate, shape.hidden)
        matrix(f"{block}ffn_down", shape.hidden, shape.intermediate)
    norm("output_norm", shape.hidden)
    if not shape.tied:
        matrix("output", shape.vocab_size, shape.hidden)
    return tensors


def make_gguf(
    path: Path,
    *,
    type: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Arrays | None = None,
    **sizes: Any,
) -> Path:
    """Write a random GGUF model. `sizes` are the fields of Shape; `type` a GGML type for the matrices; `metadata` adds
    or replaces fields without their architecture prefix (`rope.freq_base`) or, when they name one, as they stand;
    `tensors` adds or replaces values. A K type needs columns that are multiples of 256."""
    shape = Shape(**sizes)
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value in (_gguf_fields(shape) | dict(metadata or {})).items():
        full_key = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{shape.arch}.{key}"
        _add_field(writer, full_key, value)
    rng = np.random.default_rng(shape.seed)
    for name, values in (random_tensors(shape) | (tensors or {})).items():
        if shape.arch == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            values = _interleave(values, shape.head_dim)
        _add_tensor(writer, name, values, type if values.ndim == 2 else "F32", rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_folder(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    num_files: int = 1,
    config: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Path:
    """Write a random Hugging Face folder. `config` adds or replaces fields of config.json."""
    shape = Shape(**sizes)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config(shape) | dict(config or {}), indent=1))
    tensors = {_folder_name(name): torch.from_numpy(values).to(dtype) for name, values in random_tensors(shape).items()}
    if num_files == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_parts(path, tensors, num_files)
    _write_tokenizer(path, shape)
    return path


def random_blocks(type_name: str, rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks of a K type, whose scales are small finite numbers: u8 [rows, bytes of a row]."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (rows * columns // block_len, block_bytes), dtype=np.uint8)
    scale = np.array([columns**-0.5 / 500], np.float16).view(np.uint8)
    if type_name == "Q6_K":
        blocks[:, -2:] = scale
    else:
        blocks[:, :2] = scale
        blocks[:, 2:4] = scale
    return blocks.reshape(rows, -1)


def _gguf_fields(shape: Shape) -> dict[str, Any]:
    tokens, merges = vocabulary(shape.vocab_size)
    return {
        "general.name": f"tiny {shape.arch}",
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],  # control, normal
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], type_name: str, rng: np.random.Generator
) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name.endswith("_K"):
        writer.add_tensor(name, random_blocks(type_name, *values.shape, rng), raw_dtype=kind)
    else:
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


def _interleave(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of q or k from pairs (i, i + head_dim / 2) to pairs (2i, 2i + 1), as GGUF's llama files have them."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(values.shape))


def _config(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.arch]],
        "model_type": shape.arch,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "bos_token_id": vocabulary(0)[0].index("<|endoftext|>"),
        "eos_token_id": vocabulary(0)[0].index("<|im_end|>"),
    }
    if shape.arch == "llama":
        config["mlp_bias"] = "ffn_up" in shape.biases
    if shape.arch in ("llama", "qwen3"):
        config["attention_bias"] = "attn_q" in shape.biases
    return config


def _folder_name(name: str) -> str:
    block, _, kind = name.rpartition(".")
    if block.startswith("blk."):
        _, layer, block = block.split(".")
        return f"model.layers.{layer}.{FOLDER_NAMES[block]}.{kind}"
    return f"{FOLDER_NAMES[block]}.{kind}"


def _save_parts(path: Path, tensors: dict[str, torch.Tensor], num_files: int) -> None:
    weight_map = {}
    for part in range(num_files):
        name = f"model-{part + 1:05}-of-{num_files:05}.safetensors"
        chosen = {key: tensor for index, (key, tensor) in enumerate(tensors.items()) if index % num_files == part}
        save_file(chosen, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tokenizer(path: Path, shape: Shape) -> None:
    tokens, merges = vocabulary(shape.vocab_size)
    special = [index for index, token in enumerate(tokens) if token.startswith("<|")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index]} | flags for index in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens) if index not in set(special)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small random model: a GGUF file, or a folder.")
    parser.add_argument("path", type=Path, help="a name that ends in .gguf writes a GGUF file, any other a folder")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--type", default="F32", help="GGML type of a GGUF file's matrices (default: F32)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    biases = ("attn_q", "attn_k", "attn_v") if arguments.arch == "qwen2" else ()
    sizes = {"arch": arguments.arch, "seed": arguments.seed, "biases": biases}
    if arguments.type.endswith("_K"):
        sizes |= {"hidden": 256, "intermediate": 512, "head_dim": 64}
    if arguments.path.suffix == ".gguf":
        make_gguf(arguments.path, type=arguments.type, **sizes)
    else:
        make_folder(arguments.path, **sizes)


if __name__ == "__main__":
    main()
