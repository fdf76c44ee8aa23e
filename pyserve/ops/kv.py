"""The pool's tensor."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch


def allocate_pool(
    num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """The page-major KV pool [pages, layers, 2, kv_heads, page_size, head_dim], zeros; float32, float16 or bfloat16.

    A page is one contiguous piece with K and V of all layers. Raises ValueError for a size below one or another
    dtype, MemoryError when it does not fit.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be float32, float16 or bfloat16, not {dtype}")
    shape = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
    if min(shape) < 1:
        raise ValueError(
            f"every size of the pool must be at least 1: pages, layers, 2, kv_heads, page_size, head_dim = {shape}"
        )
    try:
        memory = map_memory(math.prod(shape) * dtype.itemsize)  # the tensor keeps it
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the pool of {num_pages} pages does not fit in memory: {error}") from error
    # Touched now: else the first step of every page waits for the system to find and clear memory, and what parked
    # state may take is reckoned with the same memory.
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def map_memory(num_bytes: int) -> mmap.mmap:
    """Memory of its own, page-aligned, in huge pages where the system has them: with small ones attention, which
    strides through the pool, waits for the TLB, and the first touch takes seven times as long.

    Raises OSError or OverflowError.
    """
    # What is shared, as it is when nothing is said, is a file to the system, and hardly any has huge pages for those.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def page_bytes(pool: torch.Tensor) -> int:
    """Bytes of one page of `pool`."""
    return pool[0].numel() * pool.element_size()
