"""The CUDA backend for Python: programs, copy streams and memory of one device (csrc/cuda/binding.cpp).

Loading it needs its own extension, which is only there when a CUDA toolkit built it, or when the tests' emulator stands
in for CUDA (`cuda-emulated`).
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pyserve.ops import weights
from pyserve.ops.program import Program, Register, StepBatch, sample_rows
from pyserve.ops.stream import CopyStream, Fence, first_line
from pyserve.ops.weights import PackedWeight

log = logging.getLogger("pyserve.device")

POOL_TYPES = (torch.float32, torch.float16, torch.bfloat16)  # in the order of DType in csrc/ops.h


def pack(type_name: str, raw: torch.Tensor | np.ndarray, rows: int, cols: int) -> PackedWeight:
    """As `ops.pack`, in the layout that the device's products read."""
    flat = weights.file_values(type_name, raw, rows, cols)
    data = torch.ops.pyserve_cuda.pack(weights.TYPE_NAMES.index(type_name), flat, rows, cols)
    return PackedWeight(type_name, rows, cols, data)


class CudaProgram(Program):
    """A program whose instructions run on the device. `run` reads logits back; `run_greedy` only token ids.

    `room` is asked before anything is put on the device: with the bytes of the weights and those to work in. It may
    raise. `expected`: sequences in a step and pages of a sequence, at most, and tokens in a page; what they need is
    taken at once.
    """

    def __init__(
        self,
        device: Any,
        *,
        max_tokens: int,
        max_samples: int,
        expected: tuple[int, int, int] | None = None,
        room: Callable[[int, int], None] = lambda weight_bytes, work_bytes: None,
        are_graphs_used: bool = True,
    ) -> None:
        self._use(torch.classes.pyserve_cuda.Program(device, max_tokens, max_samples), max_tokens, max_samples)
        self._run_greedy: Any = self._handle.run_greedy
        self._room = room
        self._handle.use_graphs(are_graphs_used)
        if expected is not None:
            self._handle.expect(*expected)

    def set_logits(self, register: Register) -> None:
        super().set_logits(register)
        self._room(*self._handle.needs())
        self._handle.upload()

    def run_greedy(self, batch: StepBatch, kv: torch.Tensor) -> torch.Tensor:
        """One step: the most probable token of each sample row, int32 [R], ties to the lower id."""
        result: torch.Tensor = self._run_greedy(
            batch.tokens, batch.positions, batch.sequences, batch.page_table, batch.sample_rows, kv
        )
        return result

    def sample(self, logits: torch.Tensor, real: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """On the host."""
        return sample_rows(logits, real, whole)

    def use_graphs(self, are_used: bool) -> None:
        """Whether decode steps may be launched as CUDA graphs."""
        self._handle.use_graphs(are_used)

    def graph_counts(self) -> tuple[int, int, str]:
        """Graphs made so far, attempts that failed, and why the latest of these did."""
        num_made, num_failed, error = self._handle.graph_counts()
        return num_made, num_failed, error


class CudaCopyStream(CopyStream):
    """Copies on a CUDA stream. Each comes after the step collected last, by an event that the device waits for; steps
    that are not collected yet must not touch its pages.
    """

    def __init__(self, device: Any) -> None:
        self._handle = torch.classes.pyserve_cuda.CopyStream(device)
        self._finalizer = weakref.finalize(self, self._handle.close)
        self._tuning: dict[str, int] = {}

    @property
    def tuning(self) -> Mapping[str, int]:
        return self._tuning

    def _behind(self, after: Fence | None) -> tuple[()]:
        if after is not None:
            raise ValueError("after: a CUDA stream orders copies behind the latest step by itself")
        return ()

    def calibrate(self, pool: torch.Tensor, limit_s: float = 2.0) -> None:
        started_s = time.monotonic()
        try:
            chunk_bytes, max_calls, min_batch_bytes = self._handle.calibrate(pool, int(limit_s * 1e6))
        except RuntimeError as error:
            log.warning("how to copy pages was not measured, and is assumed: %s", first_line(error))
            return
        self._tuning = {"chunk_bytes": chunk_bytes, "max_calls": max_calls, "min_batch_bytes": min_batch_bytes}
        batched = (
            f"pieces from {min_batch_bytes >> 10} KiB in one batch, others" if min_batch_bytes < 1 << 40 else "all"
        )
        log.info(
            "copies of pages, measured in %.0f ms: up to %d runs or combs one call each; beyond, %s by a kernel; "
            "%d MiB at a time",
            (time.monotonic() - started_s) * 1e3, max_calls, batched, chunk_bytes >> 20,
        )  # fmt: skip


class CudaMemory:
    """Memory of a device, and pinned memory of the host."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def allocate_pool(
        self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """As `ops.allocate_pool`, not zeroed: a cell is written before it is read."""
        shape = [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
        if dtype not in POOL_TYPES:
            raise ValueError(f"dtype must be float32, float16 or bfloat16 on a CUDA device, not {dtype}")
        try:
            pool: torch.Tensor = self._device.allocate(shape, POOL_TYPES.index(dtype))
        except RuntimeError as error:
            num_bytes = math.prod(shape) * dtype.itemsize
            raise MemoryError(f"the pool of {num_bytes >> 20} MiB: {first_line(error)}") from None
        return pool

    def pinned(self, memory: torch.Tensor) -> torch.Tensor:
        """The same memory, uint8 [n], pinned while the result lives. Slow: not on the event loop. Raises RuntimeError
        when the system does not allow it.
        """
        result: torch.Tensor = self._device.pinned(memory)
        return result
