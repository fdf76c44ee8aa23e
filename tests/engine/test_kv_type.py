"""Which number type the pool gets when nobody says one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyserve import kv_store, ops
from pyserve.kv_store import KV_TYPES, resolve_kv_type
from pyserve.models.load import load
from pyserve.ops import CpuDevice, Device
from pyserve.serving import build_engine
from pyserve.settings import Settings
from tools.make_tiny_model import make_gguf


class OtherDevice(CpuDevice):
    name = "cuda"


@pytest.mark.parametrize(
    ("isa", "head_dim", "device", "kv_type"),
    [
        ("avx512_bf16", 64, CpuDevice(), "bf16"),
        ("avx512_bf16", 80, CpuDevice(), "f16"),  # no whole blocks of 32 dimensions: it would be no faster
        ("avx512_bf16", 64, OtherDevice(), "f16"),
        ("avx512", 64, CpuDevice(), "f16"),
        ("generic", 128, CpuDevice(), "f16"),
    ],
)
def test_auto_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, isa: str, head_dim: int, device: Device, kv_type: str
) -> None:
    monkeypatch.setattr(kv_store, "isa", lambda: isa)
    assert resolve_kv_type("auto", head_dim, device) == kv_type
    assert [resolve_kv_type(name, head_dim, device) for name in KV_TYPES] == list(KV_TYPES)


def test_the_engine_says_which_type_it_took(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path, head_dim=32)
    model = load(path, max_tokens=16, max_samples=16, max_positions=64, num_threads=1)
    taken = {name: build_engine(model, Settings(ctx_size=64, kv_type=name), 1).info for name in ("auto", "f16", "f32")}
    assert taken["auto"].kv_type == ("bf16" if ops.isa() == "avx512_bf16" else "f16")
    assert (taken["f16"].kv_type, taken["f32"].kv_type) == ("f16", "f32")
    assert taken["f32"].page_bytes == 2 * taken["auto"].page_bytes
