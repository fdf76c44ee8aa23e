"""What the machine can do, measured on the spot: the yardsticks beside every figure."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch


def memory_read_gb_s(threads: int, size_bytes: int = 1 << 30, repeats: int = 5) -> float:
    """The best rate at which `threads` threads read memory that no cache holds, in GB/s."""
    data = torch.ones(size_bytes // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return size_bytes / min(_seconds(data) for _ in range(repeats)) / 1e9
    finally:
        torch.set_num_threads(before)


def _seconds(data: torch.Tensor) -> float:
    started = time.perf_counter()
    data.max()
    return time.perf_counter() - started


def int8_gmac_s() -> float:
    """int8 multiplications that one core does at most, in 10^9 a second."""
    with tempfile.TemporaryDirectory() as folder:
        binary, source = Path(folder) / "dot_limit", Path(__file__).with_name("dot_limit.cpp")
        subprocess.run([os.environ.get("CXX", "g++"), "-O2", "-std=c++17", str(source), "-o", str(binary)], check=True)
        return float(subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout)
