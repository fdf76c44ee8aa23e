"""The copy stream: order, events that really are not ready, failures, fences, and that no copy outlives its memory
(R13-R15, R18, R20).
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from pyserve.ops import CopyStream, Fence, allocate_pool, page_bytes


def new_pool() -> torch.Tensor:
    pool = allocate_pool(8, 1, 1, 4, 8, torch.float32)
    pool.copy_(torch.arange(pool.numel()).reshape(pool.shape))
    return pool


def new_host(pool: torch.Tensor, num_pages: int) -> torch.Tensor:
    return torch.zeros(num_pages * page_bytes(pool), dtype=torch.uint8)


def test_not_ready_is_an_answer() -> None:
    pool, stream = new_pool(), CopyStream()
    host = new_host(pool, 2)
    stream.pause()
    event = stream.copy_pages(pool, host, [3, 4], to_host=True)
    assert event.query() is False
    assert event.wait(0.01) is False
    assert not host.any()
    stream.resume()
    assert event.wait(5) is True
    assert event.query() is True
    assert torch.equal(host.view(torch.float32), pool[3:5].reshape(-1))
    stream.close()


def test_copies_run_in_order() -> None:
    """Page 0 goes out, then back in over page 1, then page 1 out: only in this order does the last hold page 0."""
    pool, stream = new_pool(), CopyStream(delay_ms=5)
    first = pool[0].clone()
    host, last = new_host(pool, 1), new_host(pool, 1)
    stream.copy_pages(pool, host, [0], to_host=True)
    middle = stream.copy_pages(pool, host, [1], to_host=False)
    event = stream.copy_pages(pool, last, [1], to_host=True)
    assert event.wait(5)
    assert middle.query()
    assert torch.equal(last.view(torch.float32), first.reshape(-1))
    stream.close()


def test_a_copy_waits_for_its_fence() -> None:
    pool, stream, fence = new_pool(), CopyStream(), Fence()
    host = new_host(pool, 1)
    event = stream.copy_pages(pool, host, [2], to_host=True, after=fence)
    assert event.wait(0.05) is False
    pool[2] = 42.0  # the step writes the page before it signals
    fence.signal()
    fence.signal()
    assert event.wait(5)
    assert (host.view(torch.float32) == 42.0).all()
    stream.close()


def test_a_fence_that_goes_away_fails_the_copy() -> None:
    pool, stream, fence = new_pool(), CopyStream(), Fence()
    event = stream.copy_pages(pool, new_host(pool, 1), [2], to_host=True, after=fence)
    del fence
    gc.collect()
    with pytest.raises(RuntimeError, match="the step that the copy waits for never ended"):
        event.wait(5)
    stream.close()


def test_a_failed_copy_fails_its_own_event_only() -> None:
    pool, stream = new_pool(), CopyStream(fail_after=1)
    host, untouched = new_host(pool, 1), new_host(pool, 1)
    good = stream.copy_pages(pool, host, [1], to_host=True)
    bad = stream.copy_pages(pool, untouched, [1], to_host=True)
    for _ in range(2):  # the failure stays, and asking does not clear it
        with pytest.raises(RuntimeError, match="copy failed: the stream was told to fail after 1 copies"):
            bad.wait(5)
        with pytest.raises(RuntimeError, match="copy failed"):
            bad.query()
    assert good.query() is True
    assert not untouched.any()
    stream.close()


def test_a_refused_copy_posts_nothing() -> None:
    pool, stream = new_pool(), CopyStream()
    host = new_host(pool, 1)
    stream.pause()
    for pages in ([], [8], [0, 1]):
        with pytest.raises(ValueError, match="combs"):
            stream.copy_pages(pool, host, pages, to_host=True)
    assert stream.num_outstanding() == 0
    stream.close()
    assert not host.any()


def test_close_waits_and_refuses_what_comes_later() -> None:
    pool, stream = new_pool(), CopyStream(delay_ms=20)
    hosts = [new_host(pool, 1) for _ in range(4)]
    events = [stream.copy_pages(pool, host, [i + 1], to_host=True) for i, host in enumerate(hosts)]
    assert stream.num_outstanding() == 4
    stream.close()
    assert all(event.query() for event in events)
    assert all(host.any() for host in hosts)
    with pytest.raises(ValueError, match="closed"):
        stream.copy_pages(pool, hosts[0], [0], to_host=True)
    stream.close()


def test_a_closed_stream_that_was_paused_finishes() -> None:
    pool, stream = new_pool(), CopyStream()
    stream.pause()
    event = stream.copy_pages(pool, new_host(pool, 1), [0], to_host=True)
    stream.close()
    assert event.query()


def test_memory_lives_until_the_copy_is_done() -> None:
    stream = CopyStream()
    stream.pause()
    pool = new_pool()
    host = new_host(pool, 1)
    storage = weakref.ref(pool.untyped_storage())
    event = stream.copy_pages(pool, host, [5], to_host=True)
    wanted = pool[5].clone()
    del pool
    gc.collect()
    stream.resume()
    assert event.wait(5)
    assert torch.equal(host.view(torch.float32), wanted.reshape(-1))
    gc.collect()
    assert storage() is None  # done means that nothing is held any more
    stream.close()


def test_a_wait_stops_no_other_thread() -> None:
    pool, stream = new_pool(), CopyStream(delay_ms=300)
    event = stream.copy_pages(pool, new_host(pool, 1), [0], to_host=True)
    num_ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.005):
            num_ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    event.wait()
    is_over.set()
    thread.join()
    assert num_ticks >= 10
    stream.close()


def test_query_never_waits() -> None:
    pool, stream = new_pool(), CopyStream(delay_ms=200)
    event = stream.copy_pages(pool, new_host(pool, 1), [0], to_host=True)
    started, slowest = time.perf_counter(), 0.0
    while True:
        before = time.perf_counter()
        is_done = event.query()
        slowest = max(slowest, time.perf_counter() - before)
        if is_done:
            break
        time.sleep(0.005)
    assert time.perf_counter() - started > 0.15
    assert slowest < 0.1
    stream.close()


def test_the_interpreter_ends_with_copies_in_flight() -> None:
    """The stream is neither closed nor dropped, and the copies' host memory is numpy's: the process ends, with all of
    them done.
    """
    script = """
import atexit
atexit.register(lambda: print("copied" if host.any() else "lost"))  # first in, so last out
import numpy as np, torch
from pyserve.ops import CopyStream, allocate_pool
pool = allocate_pool(8, 1, 1, 4, 8, torch.float32); pool.fill_(1.0)
host = np.zeros(256, dtype=np.uint8)
stream = CopyStream(delay_ms=50)
events = [stream.copy_pages(pool, torch.from_numpy(host), [i], to_host=True) for i in range(4)]
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "copied"), result.stderr
