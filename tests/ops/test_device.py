"""Which device `--device` means, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyserve import ops
from pyserve.errors import SettingsError
from pyserve.ops import cuda_build, device, flags
from pyserve.ops.build import BuildError


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
    codes = flags.architecture_flags(["8.0", "12.0"])[1::2]
    assert codes == [
        "arch=compute_80,code=sm_80",
        "arch=compute_120,code=sm_120",
        "arch=compute_120,code=compute_120",
    ]
