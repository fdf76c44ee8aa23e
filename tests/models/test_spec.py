"""What config.json and GGUF metadata mean: windows, biases, rope scaling and lengths (R40)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pyserve.models.rope import frequencies, tables
from pyserve.models.source import inspect
from pyserve.models.spec import ModelSpec
from tools.make_tiny_model import make_folder, make_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, Any]] = [
    {"rope_theta": 500000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}, "rope_theta": None},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7000.0}},
    {"rope_scaling": LLAMA3},
    {"rope_parameters": LLAMA3 | {"rope_theta": 7000.0}},
    {"rope_scaling": YARN},
    {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.5}},
    {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
]


def spec_of(tmp_path: Path, config: dict[str, Any] | None = None, **sizes: Any) -> ModelSpec:
    return inspect(make_folder(tmp_path / "model", config=config, **sizes))


@pytest.mark.parametrize("config", SCALINGS)
def test_rope_of_a_folder_is_what_transformers_makes_of_it(tmp_path: Path, config: dict[str, Any]) -> None:
    rope = spec_of(tmp_path, config, head_dim=64).rope
    oracle = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path / "model"))
    np.testing.assert_allclose(frequencies(rope), oracle.inv_freq.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(oracle.attention_scaling)


def test_rope_tables_hold_every_position(tmp_path: Path) -> None:
    rope = spec_of(tmp_path, {"rope_scaling": YARN}).rope
    cos, sin = tables(rope, None, 8200)
    angles = 8199 * frequencies(rope)
    assert cos.shape == sin.shape == (8200, 8)
    np.testing.assert_allclose(cos[8199], np.cos(angles) * rope.attention_factor, rtol=1e-6)
    np.testing.assert_allclose(sin[8199], np.sin(angles) * rope.attention_factor, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "same_as"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 8.0,
            },
            YARN | {"beta_fast": 8.0},
        ),
    ],
)
def test_rope_scaling_keys_of_gguf(tmp_path: Path, fields: dict[str, Any], same_as: dict[str, Any]) -> None:
    rope = inspect(make_gguf(tmp_path / "model.gguf", metadata=fields)).rope
    expected = spec_of(tmp_path, {"rope_scaling": same_as}).rope
    np.testing.assert_allclose(frequencies(rope), frequencies(expected), rtol=1e-9)
    assert rope.attention_factor == expected.attention_factor and rope.is_interleaved and not expected.is_interleaved


def test_window_of_mistral(tmp_path: Path) -> None:
    assert spec_of(tmp_path, {"sliding_window": 8}, arch="mistral").windows == (8, 8)
    assert spec_of(tmp_path, {}, arch="mistral").sliding_window == 4096
    assert spec_of(tmp_path, {"sliding_window": None}, arch="mistral").windows == (0, 0)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"sliding_window": 8}, (0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8)),
        ({"sliding_window": 8, "use_sliding_window": True}, (0, 0, 0)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
)
def test_windows_of_qwen(tmp_path: Path, config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert spec_of(tmp_path, config, arch="qwen3", layers=3).windows == windows


def test_window_of_gguf(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "model.gguf", metadata={"attention.sliding_window": 8})
    assert inspect(path).windows == (8, 8)


@pytest.mark.parametrize(
    ("config", "context_len"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": LLAMA3}, 2048),
    ],
)
def test_context_of_a_stretched_model(tmp_path: Path, config: dict[str, Any], context_len: int) -> None:
    assert spec_of(tmp_path, config).context_len == context_len


def test_gguf_names_itself(tmp_path: Path) -> None:
    spec = inspect(make_gguf(tmp_path / "model.gguf", type="Q5_1", arch="qwen3", tied=False))
    assert (spec.architecture, spec.name, spec.file_type) == ("qwen3", "tiny qwen3", "Q5_1")
    assert spec.is_head_normed and not spec.is_tied and not spec.rope.is_interleaved
    named = make_gguf(tmp_path / "named.gguf", metadata={"general.file_type": 15})
    assert inspect(named).file_type == "Q4_K_M"
