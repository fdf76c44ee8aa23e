"""Events as R14 and R15 ask for them: not ready is an answer, the query touches no pending error, and copies are
ordered behind steps on the device.
"""

from __future__ import annotations

import threading
import time

import pytest

from tests.cuda.device import CALLS, NOT_READY, CudaFailed, Device, comb_table

PAGE = 4096
OUT_OF_MEMORY, LAUNCH_FAILURE = 2, 719  # whatever someone else left pending


def test_not_ready_is_an_answer(device: Device) -> None:
    pool, host, stream = device.pool(8, PAGE), device.host(2, PAGE), device.stream()
    with device.paused():
        device.copy(pool, host, comb_table([1, 2]), stream, to_host=True)
        event = device.recorded(stream)
        assert device.query(event) is False
        assert device.query(event) is False
        assert not host.any()
    device.wait(event)
    assert device.query(event) is True
    assert (host == pool[1:3]).all()


@pytest.mark.parametrize("pending", [0, OUT_OF_MEMORY, LAUNCH_FAILURE])
def test_the_query_neither_reads_nor_clears_a_pending_error(device: Device, pending: int) -> None:
    stream = device.stream()
    pool, host = device.pool(8, PAGE), device.host(1, PAGE)
    device.so.emulator_set_last_error(pending)
    with device.paused():
        device.copy(pool, host, comb_table([1]), stream, to_host=True)
        event = device.recorded(stream)
        assert device.query(event) is False
        assert device.so.cudaPeekAtLastError() == pending
    device.wait(event)
    assert device.query(event) is True
    assert device.so.cudaPeekAtLastError() == pending
    assert device.so.cudaGetLastError() == pending
    assert device.so.cudaGetLastError() == 0


def test_the_runtimes_own_query_would_not_do(device: Device) -> None:
    """What the query above avoids: not-ready takes the place of the launch failure that was pending."""
    stream = device.stream()
    device.so.emulator_set_last_error(OUT_OF_MEMORY)
    with device.paused():
        assert device.so.cudaEventQuery(device.recorded(stream)) == NOT_READY
        assert device.so.cudaPeekAtLastError() == NOT_READY


def test_a_query_never_waits(device: Device) -> None:
    stream = device.stream()
    pool, host = device.pool(8, PAGE), device.host(1, PAGE)
    may_start = device.gate(stream)
    device.copy(pool, host, comb_table([1]), stream, to_host=True)
    event = device.recorded(stream)
    for _ in range(100):
        assert device.query(event) is False  # would hang, if it waited, for the gate is opened below
    may_start.set()
    device.wait(event)


def test_an_event_that_was_never_recorded_is_done(device: Device) -> None:
    event = device.event()
    assert device.query(event) is True
    device.stream_wait(device.stream(), event)
    device.wait(event)


def test_an_event_speaks_of_its_latest_record(device: Device) -> None:
    stream = device.stream()
    event = device.recorded(stream)
    device.wait(event)
    with device.paused():
        device.so.pyserve_cuda_event_record(event, stream)
        assert device.query(event) is False
    device.wait(event)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_copy_waits_on_the_device_for_the_step_that_wrote_its_pages(device: Device, is_ordered: bool) -> None:
    """The step copies into the pool. Without the wait the park takes the old bytes: it is what helps."""
    pool, host, other = device.pool(8, PAGE), device.host(2, PAGE), device.host(2, PAGE)
    other[:] = 7
    old = pool[2:4].copy()
    compute, copies = device.stream(), device.stream()
    may_step = device.gate(compute)
    device.copy(pool, other, comb_table([2, 3]), compute, to_host=False, way=CALLS)
    step = device.recorded(compute)
    if is_ordered:
        device.stream_wait(copies, step)
    device.copy(pool, host, comb_table([2, 3]), copies, to_host=True, way=CALLS)
    park = device.recorded(copies)
    if is_ordered:
        time.sleep(0.05)
        assert device.query(park) is False
        may_step.set()
    device.wait(park)
    assert (host == (7 if is_ordered else old)).all()
    may_step.set()
    device.synchronize(compute)


def test_two_restores_do_not_wait_for_each_other(device: Device) -> None:
    """Each waits for the step before it alone: the first, held up, does not hold up the second."""
    pool, host, compute = device.pool(8, PAGE), device.host(4, PAGE), device.stream()
    host[:] = 9
    step = device.recorded(compute)
    streams = [device.stream(), device.stream()]
    may_start = device.gate(streams[0])
    events = []
    for i, stream in enumerate(streams):
        device.stream_wait(stream, step)
        device.copy(pool, host[2 * i : 2 * i + 2], comb_table([2 * i, 2 * i + 1]), stream, to_host=False, way=CALLS)
        events.append(device.recorded(stream))
    device.wait(events[1])
    assert device.query(events[0]) is False
    assert (pool[2:4] == 9).all()
    may_start.set()
    device.wait(events[0])
    assert (pool[:4] == 9).all()


def test_an_event_may_go_while_work_waits_for_it(device: Device) -> None:
    pool, host = device.pool(8, PAGE), device.host(1, PAGE)
    compute, copies = device.stream(), device.stream()
    with device.paused():
        step = device.recorded(compute)
        device.stream_wait(copies, step)
        device._handles = [entry for entry in device._handles if entry[1] is not step]
        device.so.pyserve_cuda_event_destroy(step)
        device.copy(pool, host, comb_table([5]), copies, to_host=True)
    device.synchronize(copies)
    assert (host[0] == pool[5]).all()


def test_a_stream_destroyed_with_copies_in_flight_finishes_them(device: Device) -> None:
    """R20: teardown may come at any time; the events say when the memory is free."""
    pool, host, stream = device.pool(8, PAGE), device.host(2, PAGE), device.stream()
    num_streams = device.so.emulator_num_streams()
    with device.paused():
        device.copy(pool, host, comb_table([5, 6]), stream, to_host=True)
        event = device.recorded(stream)
        device._handles = [entry for entry in device._handles if entry[1] is not stream]
        device.so.pyserve_cuda_stream_destroy(stream)
        assert device.query(event) is False
    device.wait(event)
    assert (host == pool[5:7]).all()
    deadline = time.monotonic() + 5
    while device.so.emulator_num_streams() == num_streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert device.so.emulator_num_streams() == num_streams - 1


def test_a_copy_that_fails_on_the_device_is_never_done(device: Device) -> None:
    pool, host, stream = device.pool(8, PAGE), device.host(1, PAGE), device.stream()
    device.so.emulator_fail_runs(0)
    with device.paused():
        device.copy(pool, host, comb_table([1]), stream, to_host=True)
        event = device.recorded(stream)
    with pytest.raises(CudaFailed):
        device.wait(event)
    for _ in range(2):
        with pytest.raises(CudaFailed) as failed:
            device.query(event)
        assert failed.value.code not in (0, NOT_READY)
    assert not host.any()
    with pytest.raises(CudaFailed):
        device.copy(pool, host, comb_table([1]), stream, to_host=True)


def test_errors_are_each_threads_own(device: Device) -> None:
    device.so.emulator_set_last_error(OUT_OF_MEMORY)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(device.so.cudaPeekAtLastError()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert device.so.cudaGetLastError() == OUT_OF_MEMORY
