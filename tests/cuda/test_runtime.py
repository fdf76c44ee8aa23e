"""The emulated runtime itself: it refuses what CUDA refuses, is slow or fails when told to, and gives TSan no order
that CUDA does not give. Otherwise tests on it would prove nothing.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.build import EVERY_RACE, build_emulated, run_child
from tests.cuda.device import NOT_READY, SOURCES, Device

INVALID_VALUE, OUT_OF_MEMORY, INVALID_PITCH, ILLEGAL_ADDRESS = 1, 2, 12, 700
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = 1, 2, 3, 4
CHILD = Path(__file__).parent / "children" / "copies.py"


def copy(device: Device, to: int, start: int, num_bytes: int, kind: int, stream: ctypes.c_void_p | None) -> int:
    return int(
        device.so.cudaMemcpyAsync(ctypes.c_void_p(to), ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), kind, stream)
    )


def test_copies_are_checked_at_both_ends(device: Device) -> None:
    pool, host, stream = device.pool(4, 64), device.host(2, 64), device.stream()
    p, h = pool.ctypes.data, host.ctypes.data
    assert copy(device, h, p, 128, DEVICE_TO_HOST, stream) == 0
    assert copy(device, h, p, 129, DEVICE_TO_HOST, stream) == INVALID_VALUE  # past the host's end
    assert copy(device, h, p + 192, 65, DEVICE_TO_HOST, stream) == INVALID_VALUE  # past the pool's
    assert copy(device, h - 8, p, 64, DEVICE_TO_HOST, stream) == INVALID_VALUE  # into the host's from below
    assert copy(device, h, p, 64, HOST_TO_DEVICE, stream) == INVALID_VALUE  # the wrong way round
    assert copy(device, h, p, 64, DEVICE_TO_DEVICE, stream) == INVALID_VALUE
    assert copy(device, h, p, 64, DEFAULT, stream) == 0
    loose = np.zeros((2, 64), np.uint8)
    assert copy(device, loose[0].ctypes.data, loose[1].ctypes.data, 64, DEFAULT, stream) == INVALID_VALUE
    assert device.so.cudaGetLastError() == INVALID_VALUE
    assert device.so.cudaGetLastError() == 0
    device.synchronize(stream)


@pytest.mark.parametrize(
    ("to_pitch", "from_pitch", "width", "height", "error"),
    [
        (32, 64, 32, 4, 0),
        (32, 64, 33, 4, INVALID_PITCH),
        (32, 31, 32, 1, INVALID_PITCH),
        (32, 2**31, 32, 1, INVALID_PITCH),
        (32, 64, 32, 5, INVALID_VALUE),  # a fifth row is not there
        (32, 80, 32, 4, INVALID_VALUE),
    ],
)
def test_two_dimensional_copies(
    device: Device, to_pitch: int, from_pitch: int, width: int, height: int, error: int
) -> None:
    pool, host, stream = device.pool(4, 64), device.host(4, 32), device.stream()
    code = device.so.cudaMemcpy2DAsync(
        ctypes.c_void_p(host.ctypes.data),
        ctypes.c_size_t(to_pitch),
        ctypes.c_void_p(pool.ctypes.data),
        ctypes.c_size_t(from_pitch),
        ctypes.c_size_t(width),
        ctypes.c_size_t(height),
        DEVICE_TO_HOST,
        stream,
    )
    assert code == error
    device.synchronize(stream)
    assert (host == pool[:, :32]).all() == (error == 0)


def test_work_of_a_stream_runs_in_order(device: Device) -> None:
    """Page 0 out, back in over page 1, page 1 out: only in this order does the last hold page 0."""
    pool, host, last, stream = device.pool(4, 64), device.host(1, 64), device.host(1, 64), device.stream()
    first = pool[0].copy()
    device.so.emulator_slow_copies(2000)
    for to, start, kind in (
        (host[0], pool[0], DEVICE_TO_HOST),
        (pool[1], host[0], HOST_TO_DEVICE),
        (last[0], pool[1], DEVICE_TO_HOST),
    ):
        assert copy(device, to.ctypes.data, start.ctypes.data, 64, kind, stream) == 0
    assert device.so.cudaStreamQuery(stream) == NOT_READY
    device.synchronize(stream)
    assert device.so.cudaStreamQuery(stream) == 0
    assert (last[0] == first).all()


def test_memory_in_use_cannot_be_given_up(device: Device) -> None:
    """R20's check: freeing or unregistering under a copy is an error at once, not a crash some day."""
    memory, host, stream = ctypes.c_void_p(), device.host(1, 64), device.stream()
    assert device.so.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64)) == 0
    with device.paused():
        assert copy(device, host.ctypes.data, memory.value or 0, 64, DEVICE_TO_HOST, stream) == 0
        assert device.so.cudaFree(memory) == INVALID_VALUE
        assert device.so.emulator_unregister(ctypes.c_void_p(host.ctypes.data), 1) == INVALID_VALUE
        assert "while a copy of it is outstanding" in device.library.error()
    device.synchronize(stream)
    assert (host == 0xFF).all()  # fresh device memory is filled
    assert device.so.cudaFree(memory) == 0


def test_pinning(device: Device) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(memory.nbytes)
    is_pinned: Callable[[], int] = lambda: device.so.pyserve_cuda_is_pinned(address, size)  # noqa: E731
    assert device.so.pyserve_cuda_pin(address, ctypes.c_int64(0)) == INVALID_VALUE
    assert not is_pinned()
    assert device.so.pyserve_cuda_pin(address, size) == 0
    assert is_pinned()
    assert not device.so.pyserve_cuda_is_pinned(address, ctypes.c_int64(memory.nbytes + 1))
    assert device.so.pyserve_cuda_pin(address, size) == ALREADY_REGISTERED
    assert device.so.pyserve_cuda_unpin(address) == 0
    assert device.so.pyserve_cuda_unpin(address) == NOT_REGISTERED
    assert not is_pinned()
    assert device.so.cudaPeekAtLastError() == 0


def test_pinning_can_fail_and_be_slow(device: Device) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_int64(memory.nbytes)
    device.so.emulator_fail_pins(0)
    assert device.so.pyserve_cuda_pin(address, size) == OUT_OF_MEMORY
    assert device.so.cudaPeekAtLastError() == 0
    assert not device.so.pyserve_cuda_is_pinned(address, size)
    device.so.emulator_slow_pins(50_000)
    start = time.perf_counter()
    assert device.so.pyserve_cuda_pin(address, size) == 0  # only the one failed
    assert time.perf_counter() - start >= 0.05
    assert device.so.pyserve_cuda_unpin(address) == 0


def test_a_failure_in_a_stream_is_the_end_of_the_device(device: Device) -> None:
    pool, host, stream = device.pool(4, 64), device.host(1, 64), device.stream()
    device.so.emulator_fail_runs(1)
    for _ in range(2):
        assert copy(device, host.ctypes.data, pool.ctypes.data, 64, DEVICE_TO_HOST, stream) == 0
    assert device.so.cudaStreamSynchronize(stream) == ILLEGAL_ADDRESS
    assert device.so.cudaGetLastError() == ILLEGAL_ADDRESS
    assert device.so.cudaGetLastError() == ILLEGAL_ADDRESS  # never goes away
    assert copy(device, host.ctypes.data, pool.ctypes.data, 64, DEVICE_TO_HOST, stream) == ILLEGAL_ADDRESS
    device.so.emulator_reset()
    assert copy(device, host.ctypes.data, pool.ctypes.data, 64, DEVICE_TO_HOST, stream) == 0
    device.synchronize(stream)


def test_what_is_recorded_runs_when_it_is_launched_and_as_often(device: Device) -> None:
    pool, host, stream, other = device.pool(2, 64), device.host(1, 64), device.stream(), device.stream()
    first, graph = pool[0].copy(), ctypes.c_void_p()
    assert device.so.pyserve_cuda_capture_begin(stream) == 0
    assert copy(device, host.ctypes.data, pool.ctypes.data, 64, DEVICE_TO_HOST, stream) == 0
    assert device.so.pyserve_cuda_capture_end(stream, ctypes.byref(graph)) == 0
    device.synchronize(stream)
    assert not host.any()
    for value in (first, first ^ 1):
        pool[0] = value
        assert device.so.pyserve_cuda_graph_launch(graph, other) == 0
        device.synchronize(other)
        assert (host[0] == value).all()
    assert device.so.pyserve_cuda_graph_destroy(graph) == 0


UNSUPPORTED, SPOILT, UNMATCHED = 900, 901, 903


@pytest.mark.parametrize("what", ["wait", "record", "pageable", "allocate", "pin"])
def test_what_needs_the_device_spoils_a_recording(device: Device, what: str) -> None:
    pool, stream, graph, memory = device.pool(2, 64), device.stream(), ctypes.c_void_p(), ctypes.c_void_p()
    loose, event = np.zeros(1 << 16, np.uint8), device.event()
    actions: dict[str, Callable[[], int]] = {
        "wait": lambda: device.so.pyserve_cuda_stream_synchronize(stream),
        "record": lambda: device.so.pyserve_cuda_event_record(event, stream),
        "pageable": lambda: copy(device, loose.ctypes.data, pool.ctypes.data, 64, DEVICE_TO_HOST, stream),
        "allocate": lambda: device.so.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64)),
        "pin": lambda: device.so.pyserve_cuda_pin(ctypes.c_void_p(loose.ctypes.data), ctypes.c_int64(loose.nbytes)),
    }
    assert device.so.pyserve_cuda_capture_begin(stream) == 0
    assert actions[what]() == UNSUPPORTED
    assert device.so.pyserve_cuda_capture_end(stream, ctypes.byref(graph)) == SPOILT
    assert graph.value is None
    assert device.so.pyserve_cuda_capture_end(stream, ctypes.byref(graph)) == UNMATCHED


def test_other_threads_are_free_while_one_records(device: Device) -> None:
    stream, graph, codes = device.stream(), ctypes.c_void_p(), []
    loose = np.zeros(1 << 16, np.uint8)
    address = ctypes.c_void_p(loose.ctypes.data)
    assert device.so.pyserve_cuda_capture_begin(stream) == 0
    thread = threading.Thread(
        target=lambda: codes.append(device.so.pyserve_cuda_pin(address, ctypes.c_int64(loose.nbytes)))
    )
    thread.start()
    thread.join()
    assert device.so.pyserve_cuda_capture_end(stream, ctypes.byref(graph)) == 0
    assert codes == [0]
    assert device.so.pyserve_cuda_unpin(address) == 0
    assert device.so.pyserve_cuda_graph_destroy(graph) == 0


ORDERED = ["ordered", "waited", "queried", "other pages"]
UNORDERED = ["no fence", "no wait", "queried in vain", "fence too early"]


@pytest.fixture(scope="module")
def races() -> dict[str, str]:
    """What TSan says of each case."""
    build_emulated(*SOURCES, sanitizer="tsan")
    result = run_child("tsan", CHILD, *ORDERED, *UNORDERED, tsan_options=EVERY_RACE)
    assert "done" in result.output, result.output[-3000:]
    parts = re.split(r"^case (.+)$", result.output, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.xdist_group("cuda_tsan_copies")
@pytest.mark.parametrize("case", ORDERED)
def test_ordered_copies_are_no_race(races: dict[str, str], case: str) -> None:
    assert "WARNING" not in races[case], races[case][:3000]


@pytest.mark.xdist_group("cuda_tsan_copies")
@pytest.mark.parametrize("case", UNORDERED)
def test_a_missing_order_is_a_race_even_when_the_bytes_are_right(races: dict[str, str], case: str) -> None:
    assert "data race" in races[case]


def test_copies_under_the_address_sanitizer() -> None:
    build_emulated(*SOURCES, sanitizer="asan")
    result = run_child("asan", CHILD, "every way")
    assert result.code == 0, result.output[-3000:]
    assert "runtime error" not in result.output
    assert "done" in result.output
