"""The kernels' tests once more for each lesser instruction set of this machine.

Each in a process of its own, since the choice is made once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyserve.ops  # noqa: F401  loads the kernels

FILES = ("test_linear.py", "test_norm.py", "test_activation.py", "test_sample_kernel.py")
LEVELS = ("generic", "avx2")  # avx512_bf16 differs from avx512 in attention alone
THIS = torch.ops.pyserve.isa()
RUN = """
import sys, pytest, torch, pyserve.ops
assert torch.ops.pyserve.isa() == sys.argv[1]
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("isa", LEVELS[: LEVELS.index(THIS)] if THIS in LEVELS else LEVELS)
def test_the_same_tests_pass(isa: str) -> None:
    folder = Path(__file__).parent
    arguments = [isa, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *(str(folder / name) for name in FILES)]
    run = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env={**os.environ, "PYSERVE_CPU_ISA": isa},
        cwd=folder.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
