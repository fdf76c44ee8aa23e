"""Logits against transformers, on small random folders of every shape, and GGUF files against folders (R40)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pyserve.models.files import BLOCKS
from pyserve.models.rope import frequencies
from tests.models.running import Running
from tools.make_tiny_model import make_folder, make_gguf

QKV = ("attn_q", "attn_k", "attn_v")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
TOKENS = np.random.default_rng(3).integers(0, 256, 50).tolist()
CHUNKS = (17, 3, 20)  # of the prompt; the rest are decode steps

SHAPES: dict[str, dict[str, Any]] = {
    "llama 2": {"kv_heads": 4, "tied": False},
    "smollm2": {"heads": 6, "kv_heads": 2, "hidden": 96},
    "llama 3": {"config": {"rope_scaling": LLAMA3, "rope_theta": 500000.0}},
    "linear": {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "yarn": {"config": {"rope_scaling": YARN}, "tied": False},
    "biases": {"biases": (*QKV, "attn_output", *MLP)},
    "explicit head": {"head_dim": 32},
    "gelu": {"config": {"hidden_act": "gelu_pytorch_tanh"}},
    "mistral": {"arch": "mistral", "config": {"sliding_window": 9}, "tied": False},
    "qwen2": {"arch": "qwen2", "biases": QKV},
    "qwen2 window": {"arch": "qwen2", "biases": QKV, "config": QWEN_WINDOW, "layers": 3},
    "qwen3": {"arch": "qwen3", "head_dim": 32, "tied": False},
    "qwen3 biases": {"arch": "qwen3", "biases": (*QKV, "attn_output")},
}


def expected_logits(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path = make_folder(tmp_path / "model", **SHAPES[name])
    found = Running(path).logits(TOKENS, CHUNKS)
    torch.testing.assert_close(found, expected_logits(path), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_folder(tmp_path / "model", dtype=dtype, num_files=2, tied=False)
    found = Running(path).logits(TOKENS, CHUNKS)
    torch.testing.assert_close(found, expected_logits(path), atol=2e-5, rtol=1e-5)


def test_a_head_that_is_stored_though_tied_is_left_alone(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "model")
    expected = Running(path).logits(TOKENS, CHUNKS)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(299, 64)}, path / "model.safetensors")
    assert torch.equal(Running(path).logits(TOKENS, CHUNKS), expected)


@pytest.mark.parametrize("name", ["llama 2", "smollm2", "biases", "qwen2", "qwen3"])
def test_a_gguf_file_of_the_same_values_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "model", **SHAPES[name])
    file = make_gguf(tmp_path / "model.gguf", **SHAPES[name])
    found = Running(file).logits(TOKENS, CHUNKS)
    torch.testing.assert_close(found, Running(folder).logits(TOKENS, CHUNKS), atol=2e-5, rtol=1e-5)


def test_rope_factors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    folder = Running(make_folder(tmp_path / "model", config={"rope_scaling": LLAMA3}))
    plain = Running(make_folder(tmp_path / "plain"))
    factors = (frequencies(plain.spec.rope) / frequencies(folder.spec.rope)).astype(np.float32)
    file = Running(make_gguf(tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors}))
    found, expected = file.logits(TOKENS, CHUNKS), folder.logits(TOKENS, CHUNKS)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert (found - plain.logits(TOKENS, CHUNKS)).abs().max() > 0.01


@pytest.mark.parametrize("type_name", list(BLOCKS)[1:])
def test_a_quantised_file_answers_like_its_dequantised_values(tmp_path: Path, type_name: str) -> None:
    """The only difference that is left is that activations are rounded to 8 bits."""
    sizes = {"arch": "qwen2", "hidden": 256, "intermediate": 256, "head_dim": 64, "layers": 1, "tied": False}
    file = make_gguf(tmp_path / "model.gguf", type=type_name, **sizes)
    values = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.data.shape[0], -1)
        for tensor in gguf.GGUFReader(file).tensors
        if len(tensor.shape) == 2
    }
    exact = Running(make_gguf(tmp_path / "exact.gguf", tensors=values, **sizes)).logits(TOKENS, CHUNKS)
    found = Running(file).logits(TOKENS, CHUNKS)
    assert (found - exact).norm() < (0.05 if "_" in type_name else 1e-4) * exact.norm()


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "model.gguf", type="Q4_1", layers=3)
    one = Running(file, num_threads=1).logits(TOKENS, CHUNKS)
    assert torch.equal(one, Running(file, num_threads=2).logits(TOKENS, (40,)))
