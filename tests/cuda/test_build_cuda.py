"""nvcc builds the CUDA extension for every architecture that is supported, on a machine without a GPU.

A file with a kernel is compiled always; all of them are linked, and the result is loaded, in a slow job:

    PYSERVE_TEST_CUDA_BUILD=1 python -m pytest tests/cuda/test_build_cuda.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyserve.ops import cuda_build, flags
from tests.cuda.build import ROOT

SCRIPT = """
import torch, pyserve.ops
from pyserve.ops import cuda_build
torch.ops.load_library(str(cuda_build.built("any")))
print("emulated", torch.ops.pyserve_cuda.is_emulated(), "devices", torch.ops.pyserve_cuda.num_devices())
try:
    torch.classes.pyserve_cuda.Device(1000)
except ValueError as error:
    print(str(error).splitlines()[0])
"""
needs_nvcc = pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="nvcc is not installed")


@needs_nvcc
def test_a_kernel_is_compiled_for_every_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    nvcc = cuda_build.find_nvcc()
    assert nvcc is not None
    commands = cuda_build._commands(ROOT / "csrc", nvcc, cuda_build._architectures())
    (command,) = (each for each in commands if each[-1].endswith("embed.cu"))
    content = cuda_build._object(tmp_path, command, b"").read_bytes()
    for arch in ("80", "86", "89", "90", "100", "120"):
        assert f"sm_{arch}".encode() in content
    assert {Path(each[-1]).name for each in commands} == {
        path.name for path in [*flags.cuda_kernels(ROOT / "csrc"), *flags.cuda_hosts(ROOT / "csrc")]
    }


@pytest.mark.skipif(
    cuda_build.find_nvcc() is None or "PYSERVE_TEST_CUDA_BUILD" not in os.environ,
    reason="takes minutes: needs nvcc, and PYSERVE_TEST_CUDA_BUILD set",
)
def test_the_whole_extension_builds_links_and_loads() -> None:
    """In a process of its own, since the emulated extension has the same name."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated False" in done.stdout
    assert "there is no CUDA device 1000: this machine has" in done.stdout
