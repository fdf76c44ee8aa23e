"""Which device `--device` means, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.errors import SettingsError
from pyserve.ops import cuda_build, device, flags
from pyserve.ops.build import BuildError

ROOT = Path(__file__).resolve().parents[2]


def test_cpu_and_auto_need_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_build, "load", lambda **_: pytest.fail("nothing asked for CUDA"))
    assert ops.open_device("cpu").name == "cpu"
    assert ops.open_device("auto").name == "cpu"


def test_auto_serves_on_the_cpu_where_the_kernels_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise BuildError("there is no nvcc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    monkeypatch.setattr(cuda_build, "load", fail)
    assert ops.open_device("auto").name == "cpu"
    assert "a GPU is there and not used: --device cuda: there is no nvcc" in caplog.text
    with pytest.raises(SettingsError, match="--device cuda:1: there is no nvcc"):
        ops.open_device("cuda:1")


def test_without_a_driver_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    monkeypatch.setattr(cuda_build, "load", lambda **_: pytest.fail("minutes of compiling for nothing"))
    with pytest.raises(SettingsError, match="--device cuda: this machine has no CUDA driver"):
        ops.open_device("cuda")


def test_without_nvcc_the_build_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYSERVE_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(BuildError, match="there is no nvcc: install a CUDA toolkit or set CUDA_HOME"):
        cuda_build.built()


def test_machine_code_for_each_architecture_and_ptx_for_what_comes_after() -> None:
    codes = flags.architecture_flags(["8.0", "12.0+PTX"])[1::2]
    assert codes == [
        "arch=compute_80,code=sm_80",
        "arch=compute_120,code=sm_120",
        "arch=compute_120,code=compute_120",
    ]
    every = [code.split("=")[-1] for code in flags.architecture_flags(flags.cuda_architectures(""))[1::2]]
    assert every == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120"]
    assert flags.cuda_architectures("8.6;9.0a 10.0+PTX") == ["8.6", "9.0a", "10.0+PTX"]
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST: Hopper is no compute capability"):
        flags.cuda_architectures("Hopper")


@pytest.fixture
def toolkit(tmp_path: Path) -> dict[str, str]:
    """An environment that has a compiler of the name."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    return {"CUDA_HOME": str(tmp_path / "toolkit"), "PATH": str(tmp_path)}


def test_cuda_is_built_where_a_toolkit_meets_a_torch_with_cuda(toolkit: dict[str, str], tmp_path: Path) -> None:
    assert cuda_build.is_wanted(toolkit, "13.0")
    assert not cuda_build.is_wanted(toolkit, None)
    assert not cuda_build.is_wanted({"PATH": str(tmp_path)}, "13.0")
    assert not cuda_build.is_wanted({**toolkit, "PYSERVE_CUDA": "0"}, "13.0")
    assert cuda_build.is_wanted({**toolkit, "PYSERVE_CUDA": "1"}, "13.0")


def test_cuda_that_was_asked_for_and_cannot_be_is_one_line(toolkit: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="there is no nvcc: install a CUDA toolkit or set CUDA_HOME"):
        cuda_build.is_wanted({"PATH": str(tmp_path), "PYSERVE_CUDA": "1"}, "13.0")
    with pytest.raises(BuildError, match="is a build without CUDA: install torch's build"):
        cuda_build.is_wanted({**toolkit, "PYSERVE_CUDA": "1"}, None)
    with pytest.raises(BuildError, match="PYSERVE_CUDA must be 0 or 1, not yes"):
        cuda_build.is_wanted({**toolkit, "PYSERVE_CUDA": "yes"}, "13.0")


def test_setup_says_what_is_missing_before_it_compiles_anything(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "PYSERVE_CUDA": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("there is no nvcc: install a CUDA toolkit or set CUDA_HOME")
    assert "Traceback" not in done.stderr


def test_auto_means_the_gpu_or_nothing_where_cuda_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    monkeypatch.setenv("PYSERVE_CUDA", "1")
    with pytest.raises(SettingsError, match="--device cuda: this machine has no CUDA driver"):
        ops.open_device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYSERVE_CUDA", "0")
    assert ops.open_device("auto").name == "cpu"
