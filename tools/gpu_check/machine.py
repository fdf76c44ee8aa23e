"""The device under check: pyserve's kernels built by nvcc into one library that needs nothing but the driver, or, for a
dry run, the same sources on the emulator.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.cuda import build
from tests.cuda.device import PoolCopy, Tuning

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).resolve().parent / "device.cu"
BUILD = ROOT / "build" / "gpu_check"
DEVICE, PINNED, MANAGED = range(3)


def sources() -> list[Path]:
    return [*sorted(build.CSRC.glob("*.cu")), HELPERS, build.KERNELS / "probe.cu", ROOT / "csrc/cpu/page_copy.cpp"]


def device_library(arch: str | None = None) -> Path:
    """Built by nvcc unless it is there already. `arch`: as sm_90a; None: that of the GPU here. Raises RuntimeError."""
    chosen = arch or f"sm_{compute_capability()}"
    headers = sorted([*build.CSRC.glob("*.cuh"), *build.CSRC.glob("*.h"), ROOT / "csrc/ops.h", ROOT / "csrc/check.h"])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources(), *headers])).hexdigest()[:12]
    path = BUILD / f"pyserve_kernels_{chosen}_{digest}.so"
    if path.exists():
        return path
    nvcc = build.nvcc()
    if nvcc is None:
        raise RuntimeError(
            f"nvcc is not here, and neither is {path.relative_to(ROOT)}: build it where nvcc is, with --build-only"
        )
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compiled, nvcc, chosen, source, Path(folder)) for source in sources()]
        objects = [str(job.result()) for job in jobs]
        unfinished = Path(folder) / path.name
        run_nvcc([nvcc, f"-arch={chosen}", "-shared", "-cudart", "static", *objects, "-o", str(unfinished)])
        unfinished.rename(path)
    return path


def compiled(nvcc: str, arch: str, source: Path, folder: Path) -> Path:
    output = folder / f"{source.parent.name}-{source.stem}.o"
    includes = [f"-I{place}" for place in (build.CSRC, build.CSRC.parent, source.parent)]
    command = [nvcc, f"-arch={arch}", "-std=c++17", "-O3", "-Xcompiler", "-fPIC", *includes]
    run_nvcc([*command, "-c", str(source), "-o", str(output)])
    return output


def run_nvcc(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-1500:]}")


def compute_capability() -> str:
    """ "90a" on an H200. Raises RuntimeError without a GPU."""
    text = ask_nvidia_smi("compute_cap")
    digits = text.replace(".", "")
    return digits + "a" if digits == "90" else digits


def ask_nvidia_smi(field: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError("no GPU here: nvidia-smi is not installed")
    done = subprocess.run(
        [tool, f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise RuntimeError(f"no GPU here: {(done.stdout + done.stderr).strip()[:200]}")
    return done.stdout.splitlines()[0].strip()


class DeviceError(RuntimeError):
    """A call on the device failed; one line."""


class Machine:
    """Memory, streams, clocks and launches on the device."""

    def __init__(self, *, is_dry: bool) -> None:
        self.is_dry = is_dry
        path = build.build_emulated(*sources()) if is_dry else device_library()
        self.so = ctypes.CDLL(str(path))
        self.so.gpu_check_error_name.restype = ctypes.c_char_p
        if is_dry:
            self.so.emulator_error.restype = ctypes.c_char_p
        self.call("gpu_check_open", 0)
        numbers = [ctypes.c_int32() for _ in range(4)]
        self.call("gpu_check_attributes", *(ctypes.byref(number) for number in numbers))
        self.num_sms, self.shared_bytes, major, minor = (number.value for number in numbers)
        self.capability = f"{major}.{minor}"
        self._memory: list[tuple[int, int]] = []

    def call(self, function: str, *arguments: Any) -> None:
        """Integers as 64 bits, arrays as pointers. Raises DeviceError unless it returns 0."""
        code = getattr(self.so, function)(*map(build.as_argument, arguments))
        if code:
            name = self.so.gpu_check_error_name(ctypes.c_int64(code)).decode()
            detail = self.so.emulator_error().decode() if self.is_dry else ""
            raise DeviceError(f"{function}: {name} ({code}) {detail}".rstrip())

    def allocate(self, num_bytes: int, kind: int = DEVICE) -> int:
        address = ctypes.c_void_p()
        self.call("gpu_check_allocate", ctypes.byref(address), num_bytes, kind)
        self._memory.append((address.value or 0, kind))
        return address.value or 0

    def release_all(self) -> None:
        self.synchronize()
        for address, kind in self._memory:
            self.call("gpu_check_release", ctypes.c_void_p(address), kind)
        self._memory.clear()

    def pinned(self, *shape: int) -> NDArray[np.uint8]:
        """Pinned host memory as uint8 [*shape]."""
        count = int(np.prod(shape))
        view = (ctypes.c_uint8 * count).from_address(self.allocate(count, PINNED))
        return np.frombuffer(memoryview(view), np.uint8).reshape(shape)

    def upload(self, array: NDArray[Any]) -> int:
        address = self.allocate(array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: NDArray[Any]) -> None:
        staged = self.pinned(array.nbytes) if self.is_dry else np.ascontiguousarray(array)
        if self.is_dry:
            staged[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.call("gpu_check_copy", ctypes.c_void_p(address), staged, array.nbytes)

    def read(self, address: int, array: NDArray[Any]) -> NDArray[Any]:
        """Fills the array from the device."""
        staged = self.pinned(array.nbytes)
        self.call("gpu_check_copy", staged, ctypes.c_void_p(address), array.nbytes)
        array.view(np.uint8).reshape(-1)[:] = staged
        return array

    def synchronize(self) -> None:
        self.call("gpu_check_synchronize")

    def stream(self, *, is_urgent: bool = False) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call("pyserve_cuda_stream_create", ctypes.byref(handle), is_urgent)
        return handle

    def clock(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call("gpu_check_clock_create", ctypes.byref(handle))
        return handle

    def record(self, clock: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self.call("pyserve_cuda_event_record", clock, stream)

    def elapsed_ms(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        result = ctypes.c_float()
        self.call("pyserve_cuda_event_wait", end)
        self.call("gpu_check_elapsed_ms", start, end, ctypes.byref(result))
        return result.value

    def time_ms(self, work: Callable[[], None], stream: ctypes.c_void_p, repeats: int) -> float:
        """Median time on the device of one call of `work`, which posts to the stream; two calls to warm up."""
        clocks = [(self.clock(), self.clock()) for _ in range(repeats)]
        for _ in range(2):
            work()
        for start, end in clocks:
            self.record(start, stream)
            work()
            self.record(end, stream)
        times = [self.elapsed_ms(start, end) for start, end in clocks]
        for pair in clocks:
            for clock in pair:
                self.call("pyserve_cuda_event_destroy", clock)
        return statistics.median(times)

    def host_time_us(self, work: Callable[[], None], repeats: int) -> float:
        """Median time that the host spends posting `work`."""
        times = []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e6)
            self.synchronize()
        return statistics.median(times[2:])

    def post_copy(self, request: PoolCopy, stream: ctypes.c_void_p) -> None:
        message = ctypes.create_string_buffer(300)
        code = self.so.pyserve_cuda_page_copy(ctypes.byref(request), stream, message, ctypes.c_int64(300))
        if code:
            name = self.so.gpu_check_error_name(ctypes.c_int64(code)).decode()
            raise DeviceError(f"page_copy: {message.value.decode() or name}")


def copy_request(
    pool: int,
    num_pages: int,
    page_bytes: int,
    host: NDArray[np.uint8],
    table: NDArray[np.int32],
    *,
    to_host: bool,
    way: int,
    staging: tuple[int | None, int] = (None, 0),
    hashes: int | None = None,
    tuning: Tuning | None = None,
) -> PoolCopy:
    """The table and the host buffer must outlive it. `staging`: address and bytes."""
    return PoolCopy(
        pool, num_pages, page_bytes, host.ctypes.data, host.nbytes, table.ctypes.data, len(table), to_host, way,
        tuning or Tuning(16 << 20, 16, 64 << 10), *staging, hashes,
    )  # fmt: skip
