"""The copy engine on the emulated device: what a test needs around ctypes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyserve.page_runs import combs, runs
from tests.cuda.build import ROOT, Library

SOURCES = ("page_copy.cu", "calibrate.cu", "event.cu", "graph.cu", "pinned.cu", ROOT / "csrc" / "cpu" / "page_copy.cpp")
NOT_READY = 600
AUTOMATIC, CALLS, BATCHED, KERNEL = range(4)
Bytes = NDArray[np.uint8]
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Tuning(ctypes.Structure):
    _fields_ = (
        ("chunk_bytes", ctypes.c_int64),
        ("max_calls", ctypes.c_int64),
        ("min_batch_bytes", ctypes.c_int64),
    )


class PoolCopy(ctypes.Structure):
    """As in csrc/cuda/cuda_ops.h."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("host", ctypes.c_void_p),
        ("host_bytes", ctypes.c_int64),
        ("combs", ctypes.c_void_p),
        ("num_combs", ctypes.c_int64),
        ("to_host", ctypes.c_int64),
        ("way", ctypes.c_int64),
        ("tuning", Tuning),
        ("staging", ctypes.c_void_p),
        ("staging_bytes", ctypes.c_int64),
        ("hashes", ctypes.c_void_p),
    )


class CudaFailed(RuntimeError):
    def __init__(self, function: str, code: int, message: str = "") -> None:
        super().__init__(f"{function}: {code} {message}")
        self.code = code
        self.message = message


def comb_table(pages: Sequence[int]) -> NDArray[np.int32]:
    """int32 [combs, 5] of a page list, as the engine makes it."""
    rows = [(c.start, c.run_pages, c.stride_pages, c.count, c.list_offset) for c in combs(runs(pages))]
    return np.array(rows, np.int32).reshape(-1, 5)


def page_hashes(pages: Bytes) -> NDArray[np.uint64]:
    """The hash that csrc/cuda/page_move.cuh defines, of each row."""
    words: NDArray[np.uint64] = np.ascontiguousarray(pages).view(np.uint64)
    with np.errstate(over="ignore"):
        steps = np.arange(1, words.shape[1] + 1, dtype=np.uint64)
        x: Any = words + steps * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return np.asarray((x ^ (x >> np.uint64(33))).sum(axis=1, dtype=np.uint64))


class Device:
    """The emulated device with the copy engine loaded. Memory that a test hands over is registered until `close`."""

    def __init__(self, sanitizer: str | None = None) -> None:
        self.library = Library(*SOURCES, sanitizer=sanitizer)
        self.so = self.library.so
        self.so.emulator_reset()
        self._registered: dict[int, tuple[Any, int]] = {}
        self._kept: list[object] = []
        self._handles: list[tuple[str, ctypes.c_void_p]] = []
        for name in ("num_copy_calls", "num_blocking_copies", "num_outstanding", "num_streams", "num_blocks"):
            getattr(self.so, f"emulator_{name}").restype = ctypes.c_int64
        self.so.pyserve_cuda_page_copy_way.restype = ctypes.c_int64

    def memory(self, array: NDArray[Any], *, is_pinned: bool) -> NDArray[Any]:
        """Makes an array device memory, or pinned host memory."""
        code = self.so.emulator_register(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), int(is_pinned)
        )
        self._check("emulator_register", code)
        self._registered[array.ctypes.data] = (array, int(is_pinned))
        return array

    def pool(self, num_pages: int, page_bytes: int, seed: int = 0) -> Bytes:
        """Device memory [num_pages, page_bytes] of random bytes."""
        values = np.random.default_rng(seed).integers(0, 256, num_pages * page_bytes + 16, np.uint8)
        values = values[-values.ctypes.data % 16 :][: num_pages * page_bytes]  # on 16 bytes
        return self.memory(values.reshape(num_pages, page_bytes), is_pinned=False)

    def host(self, num_pages: int, page_bytes: int, *, is_pinned: bool = True) -> Bytes:
        whole = np.zeros(num_pages * page_bytes + 16, np.uint8)
        values = whole[-whole.ctypes.data % 16 :][: num_pages * page_bytes].reshape(num_pages, page_bytes)
        return self.memory(values, is_pinned=True) if is_pinned else values

    def stream(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._check("stream_create", self.so.pyserve_cuda_stream_create(ctypes.byref(handle), ctypes.c_int64(0)))
        self._handles.append(("stream", handle))
        return handle

    def event(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._check("event_create", self.so.pyserve_cuda_event_create(ctypes.byref(handle)))
        self._handles.append(("event", handle))
        return handle

    def recorded(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = self.event()
        self._check("event_record", self.so.pyserve_cuda_event_record(event, stream))
        return event

    def query(self, event: ctypes.c_void_p) -> bool:
        code = self.so.pyserve_cuda_event_query(event)
        if code == NOT_READY:
            return False
        self._check("event_query", code)
        return True

    def wait(self, event: ctypes.c_void_p) -> None:
        self._check("event_wait", self.so.pyserve_cuda_event_wait(event))

    def stream_wait(self, stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
        self._check("stream_wait", self.so.pyserve_cuda_stream_wait(stream, event))

    def synchronize(self, stream: ctypes.c_void_p) -> None:
        self._check("stream_synchronize", self.so.pyserve_cuda_stream_synchronize(stream))

    def gate(self, stream: ctypes.c_void_p) -> threading.Event:
        """Later work of the stream waits until the event is set (or half a minute is over)."""
        opened = threading.Event()

        def wait(_: int | None) -> None:
            opened.wait(30)

        callback = HOST_FUNCTION(wait)
        self._kept.append(callback)
        self._check("cudaLaunchHostFunc", self.so.cudaLaunchHostFunc(stream, callback, None))
        return opened

    def request(
        self,
        pool: Bytes,
        host: Bytes,
        table: NDArray[np.int32],
        *,
        to_host: bool,
        way: int = AUTOMATIC,
        chunk_bytes: int = 16 << 20,
        max_calls: int = 16,
        min_batch_bytes: int = 64 << 10,
        staging: Bytes | None = None,
        hashes: NDArray[np.uint64] | None = None,
    ) -> PoolCopy:
        """The table must outlive the request."""
        return PoolCopy(
            pool=pool.ctypes.data,
            num_pages=pool.shape[0],
            page_bytes=pool.shape[1],
            host=host.ctypes.data,
            host_bytes=host.nbytes,
            combs=table.ctypes.data,
            num_combs=len(table),
            to_host=to_host,
            way=way,
            tuning=Tuning(chunk_bytes, max_calls, min_batch_bytes),
            staging=None if staging is None else staging.ctypes.data,
            staging_bytes=0 if staging is None else staging.nbytes,
            hashes=None if hashes is None else hashes.ctypes.data,
        )

    def copy(self, pool: Bytes, host: Bytes, table: NDArray[np.int32], stream: ctypes.c_void_p, **options: Any) -> None:
        """Posts; raises CudaFailed with the message."""
        request = self.request(pool, host, table, **options)
        message = ctypes.create_string_buffer(300)
        code = self.so.pyserve_cuda_page_copy(ctypes.byref(request), stream, message, ctypes.c_int64(300))
        self._check("page_copy", code, message.value.decode())

    def hash(self, pool: Bytes, table: NDArray[np.int32], hashes: NDArray[np.uint64], stream: ctypes.c_void_p) -> None:
        host = np.zeros((len(hashes), pool.shape[1]), np.uint8)
        request = self.request(pool, host, table, to_host=True)
        code = self.so.pyserve_cuda_page_hash(
            ctypes.byref(request), ctypes.c_void_p(hashes.ctypes.data), stream, None, ctypes.c_int64(0)
        )
        self._check("page_hash", code)

    def calibrate(self, pool: Bytes, host: Bytes, stream: ctypes.c_void_p, limit_us: int = 10**7) -> Tuning:
        request, tuning = self.request(pool, host, comb_table([0]), to_host=True), Tuning()
        limit = ctypes.c_int64(limit_us)
        code = self.so.pyserve_cuda_calibrate(ctypes.byref(request), ctypes.byref(tuning), limit, stream)
        self._check("calibrate", code)
        return tuning

    def way(self, pool: Bytes, host: Bytes, table: NDArray[np.int32], **options: Any) -> int:
        """The way that `automatic` takes."""
        request = self.request(pool, host, table, to_host=True, **options)
        return int(self.so.pyserve_cuda_page_copy_way(ctypes.byref(request)))

    def num_calls(self) -> int:
        """Copy calls posted so far."""
        return int(self.so.emulator_num_copy_calls())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work that has not started waits until the end of the block."""
        self.so.emulator_pause(1)
        try:
            yield
        finally:
            self.so.emulator_pause(0)

    def close(self) -> None:
        """Waits for all work, then gives up every handle and all memory."""
        self.so.emulator_reset()
        for kind, handle in self._handles:
            getattr(self.so, f"pyserve_cuda_{kind}_destroy")(handle)
        for address, (_, is_pinned) in self._registered.items():
            self.so.emulator_unregister(ctypes.c_void_p(address), is_pinned)
        self._handles.clear()
        self._registered.clear()

    def _check(self, function: str, code: int, message: str = "") -> None:
        if code:
            raise CudaFailed(function, code, message or self.library.error())
