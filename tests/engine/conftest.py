"""A tiny random model, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyserve.models.load import Model, load
from tools.make_tiny_model import make_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = make_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=5)
    return load(path, max_tokens=600, max_samples=600, max_positions=512, num_threads=1)
