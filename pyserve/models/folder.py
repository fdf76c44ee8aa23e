"""Hugging Face folders: config.json, safetensors files (one, or several with an index) and the chat template.

The safetensors format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header, the
header, the data. It is read here rather than through the `safetensors` package, so that the bytes stay in a mapping
that is given back tensor by tensor as they are packed. Tensors get their GGUF names, so that nothing behind this file
knows which kind of file a model came from.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from .files import BLOCKS, FileTensor, MappedFile, fail, shown

MAX_JSON_BYTES = 100_000_000
TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER_PATTERN = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path
    config: dict[str, object]
    tensors: dict[str, FileTensor]  # under their GGUF names where they have one
    size_bytes: int  # of the safetensors files


def read_folder(path: Path) -> Folder:
    """Read config.json and the headers of the safetensors files. Raises ModelFileError naming what is wrong."""
    config = read_json(path / "config.json")
    tensors: dict[str, FileTensor] = {}
    size_bytes = 0
    for name in _weight_files(path):
        file = MappedFile.open(path / name)
        size_bytes += file.size
        for key, tensor in _read_safetensors(file).items():
            if key in tensors:
                fail(file.path, f"tensor {shown(key)} is in another file of the folder too")
            tensors[key] = tensor
    return Folder(path, config, tensors, size_bytes)


def read_json(path: Path) -> dict[str, object]:
    """A JSON file that holds an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            fail(path, f"larger than {MAX_JSON_BYTES} bytes")
        return _json_object(path, path.read_bytes(), "the file")
    except FileNotFoundError:
        fail(path, "the file is missing")
    except OSError as error:
        fail(path, f"cannot be read: {error.strerror or error}")


def read_chat_template(path: Path) -> str | None:
    """The folder's template: chat_template.jinja, else the one in tokenizer_config.json, where it may also be a list
    of named ones, of which `default` is taken."""
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        fail(path / "chat_template.jinja", f"cannot be read: {error}")
    config_path = path / "tokenizer_config.json"
    template = read_json(config_path).get("chat_template") if config_path.exists() else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    if template is not None and not isinstance(template, str):
        fail(config_path, "chat_template must be a string or a list of named templates")
    return template


def _weight_files(path: Path) -> list[str]:
    index_path = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists():
        return ["model.safetensors"]
    if not index_path.exists():
        fail(path, "holds neither model.safetensors nor model.safetensors.index.json")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        fail(index_path, "weight_map must be an object that names the file of each tensor")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            fail(index_path, f"weight_map names {shown(name)}, which is not a file of the folder")
        if not (path / name).is_file():
            fail(index_path, f"the file {shown(name)} that it names is missing")
    return names


def _read_safetensors(file: MappedFile) -> dict[str, FileTensor]:
    header_len = int.from_bytes(file.data[:8].tobytes(), "little")
    if file.size < 8 or header_len > min(file.size - 8, MAX_JSON_BYTES):
        fail(file.path, f"truncated or not a safetensors file: a header of {header_len} bytes in a file of {file.size}")
    header = _json_object(file.path, file.data[8 : 8 + header_len].tobytes(), "the header")
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[_gguf_name(name)] = _tensor(file, name, entry, 8 + header_len)
    return tensors


def _tensor(file: MappedFile, name: str, entry: object, data_start: int) -> FileTensor:
    if not isinstance(entry, dict):
        fail(file.path, f"the entry of tensor {shown(name)} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in TYPES:
        fail(file.path, f"tensor {shown(name)} has type {shown(dtype)}, not one of {', '.join(TYPES)}")
    if not _are_counts(shape, 1, 4) or not _are_counts(offsets, 2, 2):
        fail(file.path, f"tensor {shown(name)} has shape {shown(shape)} and data_offsets {shown(offsets)}")
    num_bytes = BLOCKS[TYPES[dtype]][1]
    for size in shape:
        num_bytes *= size
    start, end = offsets
    if end - start != num_bytes or not num_bytes:
        fail(file.path, f"tensor {shown(name)} of {dtype} {shown(shape)} needs {num_bytes} bytes, not {end - start}")
    if data_start + end > file.size:
        fail(file.path, f"truncated: tensor {shown(name)} ends at byte {data_start + end} of {file.size}")
    return FileTensor(TYPES[dtype], tuple(shape), file, data_start + start, num_bytes)


def _are_counts(value: object, least: int, most: int) -> TypeGuard[list[int]]:
    """Whether `value` is a list of `least` to `most` sizes."""
    if not isinstance(value, list) or not least <= len(value) <= most:
        return False
    return all(type(entry) is int and 0 <= entry < 1 << 63 for entry in value)


def _gguf_name(name: str) -> str:
    """The GGUF name of a tensor; one that has none keeps its own and is found to be unexpected later."""
    match = LAYER_PATTERN.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"blk.{int(match[1])}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return TOP_NAMES.get(name, name)


def _json_object(path: Path, text: bytes, what: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(path, f"{what} is not JSON: {error}")
    if not isinstance(value, dict):
        fail(path, f"{what} must be a JSON object")
    return value
