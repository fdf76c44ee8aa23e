"""Where steps run: one object that makes everything that lies or works on a device.

`cpu` needs nothing. `cuda` and `cuda:1` need a GPU and the CUDA extension; `auto` takes the first GPU when both are
there; PYSERVE_CUDA=1 makes it take the GPU or fail, PYSERVE_CUDA=0 the CPU. `cuda-emulated` runs the kernels of
csrc/cuda on the CPU, for tests.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from pyserve.errors import SettingsError
from pyserve.ops import cuda, cuda_build, kv
from pyserve.ops.build import BuildError
from pyserve.ops.program import Program
from pyserve.ops.stream import CopyStream, first_line
from pyserve.ops.weights import PackedWeight, pack

log = logging.getLogger("pyserve.device")

SPARE_BYTES = 256 << 20  # of a GPU's memory, for what the driver takes while steps run

Pack = Callable[[str, "torch.Tensor | np.ndarray", int, int], PackedWeight]


class Device(Protocol):
    """A place where steps run."""

    name: str
    pins_memory: bool  # copies beside the steps need pinned host memory
    kv_types: tuple[torch.dtype, ...]
    pack: Pack  # weights into the layout that the device's products read

    def expect(self, pool: PoolShape) -> None:
        """The pool that will be allocated beside the programs that are made from now on."""

    def program(self, *, max_tokens: int, max_samples: int, num_threads: int) -> Program:
        """Its `set_logits` raises SettingsError when weights, pool and work space do not fit, before it takes any."""

    def allocate_pool(
        self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Raises MemoryError when it does not fit."""

    def copy_stream(self) -> CopyStream: ...

    def pinned(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory as copies beside the steps need it. Raises RuntimeError when it cannot be had."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How large a pool is to be, and how many sequences at most are in one step."""

    num_pages: int
    page_size: int  # tokens
    page_bytes: int
    num_slots: int

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size


class CpuDevice:
    """The machine's own processors."""

    name = "cpu"
    pins_memory = False
    kv_types: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    pack: Pack = staticmethod(pack)

    def expect(self, pool: PoolShape) -> None:
        """Nothing: the pool's size is compared with the machine's memory when it is allocated."""

    def program(self, *, max_tokens: int, max_samples: int, num_threads: int) -> Program:
        return Program(max_tokens=max_tokens, max_samples=max_samples, num_threads=num_threads)

    def allocate_pool(
        self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return kv.allocate_pool(num_pages, num_layers, num_kv_heads, page_size, head_dim, dtype)

    def copy_stream(self) -> CopyStream:
        return CopyStream()

    def pinned(self, memory: torch.Tensor) -> torch.Tensor:
        return memory


class CudaDevice:
    """One GPU. Its extension is loaded."""

    pins_memory = True
    kv_types: tuple[torch.dtype, ...] = cuda.POOL_TYPES
    pack: Pack = staticmethod(cuda.pack)

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        try:
            self._handle: Any = torch.classes.pyserve_cuda.Device(index)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(f"--device {name}: {first_line(error)}") from None
        self._memory = cuda.CudaMemory(self._handle)
        self._expected: PoolShape | None = None

    def expect(self, pool: PoolShape) -> None:
        self._expected = pool

    def program(self, *, max_tokens: int, max_samples: int, num_threads: int) -> Program:
        pool = self._expected
        return cuda.CudaProgram(
            self._handle,
            max_tokens=max_tokens,
            max_samples=max_samples,
            expected=None if pool is None else (pool.num_slots, pool.num_pages, pool.page_size),
            room=self._check_room,
            are_graphs_used=os.environ.get("PYSERVE_CUDA_GRAPHS", "1") != "0",
        )

    def _check_room(self, weight_bytes: int, work_bytes: int) -> None:
        """Raises SettingsError, one line with the numbers and what would fit."""
        free_bytes, total_bytes = self._handle.memory()
        pool = self._expected or PoolShape(0, 1, 1, 0)
        left_bytes = free_bytes - SPARE_BYTES - weight_bytes - work_bytes
        if pool.num_pages * pool.page_bytes <= left_bytes:
            return
        num_tokens = max(0, left_bytes // pool.page_bytes) * pool.page_size
        advice = f"--ctx-size {num_tokens} would fit" if num_tokens else "no --ctx-size fits: take a smaller model"
        raise SettingsError(
            f"--ctx-size {pool.num_tokens}: {_mib(pool.num_pages * pool.page_bytes)} for the KV pool, "
            f"{_mib(weight_bytes)} of weights and {_mib(work_bytes)} to work in are more than {self.name} has: "
            f"{_mib(free_bytes)} of {_mib(total_bytes)} are free, {_mib(SPARE_BYTES)} of them are kept for the driver; "
            f"{advice}"
        )

    def allocate_pool(
        self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._memory.allocate_pool(num_pages, num_layers, num_kv_heads, page_size, head_dim, dtype)

    def copy_stream(self) -> CopyStream:
        return cuda.CudaCopyStream(self._handle)

    def pinned(self, memory: torch.Tensor) -> torch.Tensor:
        return self._memory.pinned(memory)


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes >> 20)} MiB"


def open_device(name: str) -> Device:
    """The device that `--device` names. Raises SettingsError, one line, when this machine does not have it."""
    if name == "cpu":
        return CpuDevice()
    if name == "auto":
        return _best_device()
    is_emulated = name == cuda_build.EMULATED
    if not is_emulated and not _has_driver():  # known before minutes of compiling
        raise SettingsError(f"--device {name}: this machine has no CUDA driver, or it finds no GPU")
    try:
        cuda_build.load(is_emulated=is_emulated)
    except BuildError as error:
        raise SettingsError(f"--device {name}: {error.message}") from None
    return CudaDevice(name, int(name.partition(":")[2] or 0))


def _best_device() -> Device:
    """A GPU that cannot be used is no reason not to serve, unless PYSERVE_CUDA=1 says that it is."""
    choice = os.environ.get("PYSERVE_CUDA", "")
    if choice == "1":
        return open_device("cuda")
    if choice == "0" or not torch.cuda.is_available():
        return CpuDevice()
    try:
        return open_device("cuda")
    except SettingsError as error:
        log.warning("a GPU is there and not used: %s", error.message)
        return CpuDevice()


def _has_driver() -> bool:
    """Whether CUDA's driver is installed and finds a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
