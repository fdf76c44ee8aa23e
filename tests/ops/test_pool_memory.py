"""The pool's memory is there from the start."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import torch

from pyserve.ops import allocate_pool, map_memory


def test_whoever_writes_to_a_page_first_does_not_wait_for_the_system() -> None:
    pool = allocate_pool(256, 4, 2, 16, 64, torch.float16)
    num_bytes = pool.numel() * pool.element_size()
    assert num_bytes == 8 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pool.fill_(1.0)
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < num_bytes // mmap.PAGESIZE // 10


def test_the_system_may_give_huge_pages_for_it() -> None:
    """Which few do for what is shared with others, as a file in memory is."""
    pool = allocate_pool(16, 4, 2, 16, 64, torch.float16)
    memory = map_memory(1 << 20)
    for start in (pool.data_ptr(), torch.frombuffer(memory, dtype=torch.uint8).data_ptr()):
        assert rights_at(start) == "rw-p"


def rights_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        stretch, rights, *_ = line.split()
        first, end = (int(place, 16) for place in stretch.split("-"))
        if first <= address < end:
            return rights
    raise AssertionError("nothing is mapped there")
