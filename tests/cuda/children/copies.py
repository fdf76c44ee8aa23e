"""Runs in a child under a sanitizer. Each case prints its name first, so that reports can be told apart.

The cases of TSan: a step writes pages of the pool on one stream, a park reads them on another, and then the host takes
the pages for something else. The case's name says what orders them. The bytes are always right, for each part is long
over when the next begins: only TSan can tell.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

from tests.cuda.device import AUTOMATIC, BATCHED, CALLS, KERNEL, Device, comb_table

PAGE = 256
PAGES = [5, 2]


def park_after_step(device: Device, case: str) -> None:
    pool, written, host = device.pool(12, PAGE), device.host(2, PAGE), device.host(2, PAGE)
    compute, copies = device.stream(), device.stream()
    early = device.recorded(compute)
    device.copy(pool, written, comb_table(PAGES), compute, to_host=False, way=KERNEL)  # the step
    step = device.recorded(compute)
    until_idle(device)
    if case in ("ordered", "queried", "no wait", "queried in vain"):
        device.stream_wait(copies, step)
    elif case == "fence too early":
        device.stream_wait(copies, early)
    elif case == "waited":
        device.wait(step)
    pages = [3, 7] if case == "other pages" else PAGES
    device.copy(pool, host, comb_table(pages), copies, to_host=True, way=CALLS)
    park = device.recorded(copies)
    until_idle(device)
    if case == "queried":
        assert device.query(park)
    elif case == "queried in vain":
        device.query(early)
    elif case != "no wait":
        device.wait(park)
    ctypes.memset(pool.ctypes.data + pages[0] * PAGE, 3, PAGE)  # as another sequence's step would


def until_idle(device: Device) -> None:
    """Waits in a way that orders nothing."""
    while device.so.emulator_num_outstanding() > 0:
        time.sleep(0.005)


def every_way(device: Device) -> None:
    page_bytes, pages = 4096 + 16, [1, 2, 5, 9, 8]
    pool, stream = device.pool(12, page_bytes), device.stream()
    host, staging = device.host(5, page_bytes), device.pool(2, page_bytes)
    for way in (AUTOMATIC, CALLS, BATCHED, KERNEL):
        for to_host in (True, False):
            device.copy(pool, host, comb_table(pages), stream, to_host=to_host, way=way)
            device.copy(pool, host, comb_table(pages), stream, to_host=to_host, way=way, staging=staging)
            device.synchronize(stream)
            assert (host == pool[pages]).all()


def main(cases: list[str]) -> None:
    kept: list[Any] = []  # memory that came back to the allocator would be taken for the next case's
    for case in cases:
        print(f"case {case}", flush=True)
        device = Device()
        if case == "every way":
            every_way(device)
        else:
            park_after_step(device, case)
        kept.append(dict(device._registered))
        device.close()
    print("case end\ndone", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
