"""The pool's memory is there from the start."""

from __future__ import annotations

import mmap
import resource

import torch

from pyserve.ops import allocate_pool


def test_whoever_writes_to_a_page_first_does_not_wait_for_the_system() -> None:
    pool = allocate_pool(256, 4, 2, 16, 64, torch.float16)
    num_bytes = pool.numel() * pool.element_size()
    assert num_bytes == 8 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pool.fill_(1.0)
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert num_faults < num_bytes // mmap.PAGESIZE // 10
