"""The slow job: nvcc builds the whole CUDA extension for every architecture, and it loads, with or without a GPU.

    PYSERVE_TEST_CUDA_BUILD=1 python -m pytest tests/cuda/test_build_cuda.py

In a process of its own, since the emulated extension has the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyserve.ops.cuda_build import find_nvcc
from tests.cuda.build import ROOT

SCRIPT = """
import torch
from pyserve.errors import SettingsError
from pyserve.ops import open_device
try:
    print("opened", open_device("cuda").name)
except SettingsError as error:
    print("refused", error.message)
print("emulated", torch.ops.pyserve_cuda.is_emulated(), "devices", torch.ops.pyserve_cuda.num_devices())
"""


@pytest.mark.skipif(
    find_nvcc() is None or "PYSERVE_TEST_CUDA_BUILD" not in os.environ,
    reason="takes minutes: needs nvcc, and PYSERVE_TEST_CUDA_BUILD set",
)
def test_the_whole_extension_builds_links_and_loads() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated False" in done.stdout
    if "devices 0" in done.stdout:
        assert "refused --device cuda: there is no CUDA device 0: this machine has 0" in done.stdout
    else:
        assert "opened cuda" in done.stdout
