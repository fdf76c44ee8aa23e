"""What the machine can do, measured on the spot: the yardsticks beside every figure."""

from __future__ import annotations

import time

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
