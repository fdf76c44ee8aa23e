"""Hugging Face folders: whole, sharded and broken (R39)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pyserve.errors import ModelFileError
from pyserve.models.folder import read_chat_template, read_folder
from pyserve.models.source import inspect
from tools.make_tiny_model import CHAT_TEMPLATE, make_folder


def error_of(path: Path) -> str:
    """The message about a folder that cannot be opened: one line that names it."""
    with pytest.raises(ModelFileError) as caught:
        inspect(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def change_config(path: Path, **fields: object) -> None:
    """Replace fields of config.json; None takes a field out."""
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def write_safetensors(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_what_the_safetensors_package_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = read_folder(make_folder(tmp_path / "model", dtype=dtype))
    expected = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(folder.tensors["blk.1.ffn_up.weight"].floats(), expected.float().numpy())


def test_several_files_hold_the_same_model_as_one(tmp_path: Path) -> None:
    one = read_folder(make_folder(tmp_path / "one"))
    several = read_folder(make_folder(tmp_path / "several", num_files=3))
    assert several.tensors.keys() == one.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(several.tensors[name].raw, tensor.raw)


def test_spec_of_a_folder(tmp_path: Path) -> None:
    spec = inspect(make_folder(tmp_path / "model", dtype=torch.bfloat16, layers=3, tied=False))
    assert (spec.name, spec.architecture, spec.num_layers, spec.file_type) == ("model", "llama", 3, "BF16")
    assert not spec.is_tied and spec.context_len == 2048 and spec.head_dim == 16
    assert spec.num_parameters * 2 < spec.size_bytes == (tmp_path / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"architectures": None}, "architectures must be a list"),
        ({"architectures": ["BertModel"]}, "architectures names 'BertModel', which is not supported (LlamaForCausalLM"),
        ({"num_hidden_layers": 3}, "'blk.2.attn_norm.weight' is missing"),
        ({"num_hidden_layers": 1}, "'blk.1.attn_norm.weight' is not one that a llama model has"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, not '64'"),
        ({"hidden_size": 65}, "'token_embd.weight' has shape [299, 64], not [299, 65]"),
        ({"vocab_size": 300}, "'token_embd.weight' has shape [299, 64], not [300, 64]"),
        ({"tie_word_embeddings": False}, "'output.weight' is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": True}, "'blk.0.attn_q.bias' is missing"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised folders are not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**30}}, "rope_scaling.factor is 1000"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not supported"),
    ],
)
def test_a_config_that_cannot_be_served(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    change_config(make_folder(tmp_path / "model"), **fields)
    assert expected in error_of(tmp_path / "model")


JUNK = [None, -1, 0, 1, 2.5, float("nan"), 10**400, "x", "a\nb", [], [1], {}, {"x": {}}, True]


def test_junk_in_any_field_never_ends_in_another_error(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    scaling = {"type": "yarn", "factor": 2.0, "beta_fast": 32, "original_max_position_embeddings": 64, "mscale": 1}
    optional = ["sliding_window", "layer_types", "rope_scaling", "rope_parameters", "max_window_layers"]
    changes = [{key: value} for key in [*config, *optional] for value in JUNK]
    changes += [{"rope_scaling": scaling | {key: value}} for key in scaling for value in JUNK]
    for arch in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"):
        for change in changes:
            fields = config | {"architectures": [arch], "use_sliding_window": True} | change
            (path / "config.json").write_text(json.dumps(fields))
            try:
                inspect(path)
            except ModelFileError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100_000, b"\xff\xff"])
def test_a_config_that_is_not_an_object(tmp_path: Path, content: bytes) -> None:
    make_folder(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(content)
    assert "config.json: the file" in error_of(tmp_path / "model")


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model", num_files=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    assert "'model-00002-of-00003.safetensors' that it names is missing" in error_of(path)
    (path / "model.safetensors.index.json").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in error_of(path)
    (path / "config.json").unlink()
    assert "config.json: the file is missing" in error_of(path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({}, "weight_map must be an object"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "'../../etc/passwd', which is not a file of the folder"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: dict[str, object], expected: str) -> None:
    path = make_folder(tmp_path / "model", num_files=2)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert expected in error_of(path)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"nonsense", "the header is not JSON"),
        ([], "the header must be a JSON object"),
        ({"a": 1}, "the entry of tensor 'a' is not an object"),
        ({"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}, "tensor 'a' has type 'I8', not one of F32"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "tensor 'a' has shape [-1]"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "data_offsets [0]"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes, not 4"),
        (
            {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
            "truncated: tensor 'a' ends at byte",
        ),
    ],
)
def test_a_safetensors_file_that_lies(tmp_path: Path, header: object, expected: str) -> None:
    path = make_folder(tmp_path / "model")
    write_safetensors(path / "model.safetensors", header, bytes(4))
    assert expected in error_of(path)


def test_every_truncation_of_a_safetensors_file_is_noticed(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model")
    content = (path / "model.safetensors").read_bytes()
    for length in [*range(0, 40, 3), *range(40, len(content), 9973), len(content) - 1]:
        (path / "model.safetensors").write_bytes(content[:length])
        assert "the file is empty" in error_of(path) if length == 0 else "truncated" in error_of(path)


def test_an_unexpected_tensor_is_refused_and_a_stored_frequency_is_not(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path / "model.safetensors")
    assert inspect(path).num_layers == 2
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.ones(8)}, path / "model.safetensors")
    assert "'model.layers.0.self_attn.sinks' is not one that a llama model has" in error_of(path)


def test_chat_template_of_a_folder(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model")
    assert read_chat_template(path) == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(path) == "plain"
    (path / "chat_template.jinja").write_text("from the file")
    assert read_chat_template(path) == "from the file"
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").unlink()
    assert read_chat_template(path) is None
    (path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelFileError, match="chat_template must be a string"):
        read_chat_template(path)
