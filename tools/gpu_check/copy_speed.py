"""Parts that time copies: every way, 2 KiB to 2 MiB pieces, both directions; a park of 2,000 tokens; what a park costs
the step beside it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cuda.device import AUTOMATIC, CALLS, KERNEL, Tuning, comb_table
from tools.gpu_check.correct import WAYS
from tools.gpu_check.machine import Machine, copy_request
from tools.gpu_check.results import Goal, NotHere, Result

PARK_LEN, PAGE_LEN = 2000, 16  # tokens
TOKEN_BYTES = 128 * 1024  # of an 8B model: 32 layers, 8 KV heads, 128 wide, bf16
BUS_GB_S = 50.0


def copy_speeds(machine: Machine) -> Result:
    """Scattered pages of each size by each way. GB/s by the device's clock, and the host's time a copy in us."""
    total = 64 << 10 if machine.is_dry else 256 << 20
    sizes = [2 << 10, 16 << 10] if machine.is_dry else [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20]
    has_batch = bool(machine.so.pyserve_cuda_can_batch())
    stream = machine.stream()
    rows: list[dict[str, Any]] = []
    pool, staging_bytes = machine.allocate(2 * total), min(total, 16 << 20)
    staging, host = machine.allocate(staging_bytes), machine.pinned(total)
    for page_bytes in sizes:
        num_pages = 2 * total // page_bytes
        count = min(total // page_bytes, 8192)  # calls one by one take too long beyond
        tables = {
            "scattered": np.array([[2 * i, 1, 1, 1, i] for i in np.random.default_rng(0).permutation(count)], np.int32),
            "comb": np.array([[0, 1, 2, count, 0]], np.int32),
            "adjacent": np.array([[0, count, count, 1, 0]], np.int32),
        }
        for shape, table in tables.items():
            table[:, 4] = np.arange(len(table))
            for way_name, way in WAYS.items():
                if way_name == "automatic" or (way_name == "batched" and not has_batch):
                    continue
                staged = (staging, staging_bytes) if way_name == "staged" else (None, 0)
                for to_host in (True, False):
                    request = copy_request(
                        pool, num_pages, page_bytes, host, table, to_host=to_host, way=way, staging=staged
                    )
                    work = poster(machine, request, stream)
                    ms = machine.time_ms(work, stream, 1 if machine.is_dry else 3)
                    us = machine.host_time_us(work, 1 if machine.is_dry else 3)
                    rows.append({
                        "piece_bytes": page_bytes, "pieces": count, "shape": shape, "way": way_name, "to_host": to_host,
                        "gb_s": count * page_bytes / max(ms, 1e-6) / 1e6, "host_us": us,
                    })  # fmt: skip
    best = {to_host: max(row["gb_s"] for row in rows if row["to_host"] == to_host) for to_host in (True, False)}
    goals = [
        Goal("pool to host", best[True], "GB/s", BUS_GB_S, False),
        Goal("host to pool", best[False], "GB/s", BUS_GB_S, False),
    ]
    return Result(f"out {best[True]:.1f}, in {best[False]:.1f} GB/s; {len(rows)} rows", goals, {"rows": rows})


def poster(machine: Machine, request: Any, stream: ctypes.c_void_p) -> Callable[[], None]:
    return lambda: machine.post_copy(request, stream)


def calibration(machine: Machine) -> Result:
    """What the copy engine measures for itself at start."""
    num_bytes = 1 << 20 if machine.is_dry else 256 << 20
    stream, pool, host = machine.stream(), machine.allocate(num_bytes), machine.pinned(num_bytes)
    table, tuning = np.array([[0, 1, 1, 1, 0]], np.int32), Tuning()
    request = copy_request(pool, num_bytes // 4096, 4096, host, table, to_host=True, way=CALLS)
    start = time.perf_counter()
    machine.call("pyserve_cuda_calibrate", ctypes.byref(request), ctypes.byref(tuning), 10**6, stream)
    data = {name: getattr(tuning, name) for name in ("chunk_bytes", "max_calls", "min_batch_bytes")}
    data["seconds"] = time.perf_counter() - start
    batch = f"from {tuning.min_batch_bytes >> 10} KiB" if tuning.min_batch_bytes < 1 << 40 else "never"
    summary = f"chunks of {tuning.chunk_bytes >> 20} MiB, up to {tuning.max_calls} calls, batched {batch}"
    return Result(summary, data=data)


def park(machine: Machine) -> Result:
    """Host time to post the copy of a 2,000-token sequence: pages adjacent, in a comb, and scattered."""
    page_bytes = 4096 if machine.is_dry else TOKEN_BYTES * PAGE_LEN
    count = 12 if machine.is_dry else -(-PARK_LEN // PAGE_LEN)
    num_pages = 4 * count
    stream, pool, host = machine.stream(), machine.allocate(num_pages * page_bytes), machine.pinned(count * page_bytes)
    rng = np.random.default_rng(1)
    lists = {
        "adjacent": list(range(count)),
        "comb": list(range(0, 2 * count, 2)),
        "scattered": rng.permutation(num_pages)[:count].tolist(),
    }
    data: dict[str, Any] = {}
    for shape, pages in lists.items():
        table = comb_table(pages)
        request = copy_request(pool, num_pages, page_bytes, host, table, to_host=True, way=AUTOMATIC)
        work = poster(machine, request, stream)
        data[shape] = {
            "host_us": machine.host_time_us(work, 3 if machine.is_dry else 15),
            "device_ms": machine.time_ms(work, stream, 3),
            "way": int(machine.so.pyserve_cuda_page_copy_way(ctypes.byref(request))),
        }
    worst = max(row["host_us"] for row in data.values())
    goal = Goal("host time of a park of 2,000 tokens", worst, "us", 50.0, True)
    return Result(f"at most {worst:.0f} us to post", [goal], data)


def gaps(machine: Machine) -> Result:
    """Steps (reads of device memory of about a decode step's length) alone, and while pages are parked and restored
    without a break: p99 of their durations.
    """
    step_bytes, num_steps = (1 << 16, 10) if machine.is_dry else (12 << 30, 150)
    page_bytes, count = (4096, 8) if machine.is_dry else (TOKEN_BYTES * PAGE_LEN, 128)
    try:
        data = machine.allocate(step_bytes)
    except RuntimeError as failed:
        raise NotHere(f"too little memory: {failed}") from failed
    num_blocks = 4 if machine.is_dry else machine.num_sms * 8
    sums = machine.allocate(num_blocks * 256 * 4)
    compute, copy_stream = machine.stream(is_urgent=True), machine.stream()
    pool, host = machine.allocate(2 * count * page_bytes), machine.pinned(count * page_bytes)
    table = comb_table(np.random.default_rng(2).permutation(2 * count)[:count].tolist())
    result: dict[str, Any] = {}
    for name, way in (("alone", None), ("with copies", CALLS), ("with the kernel", KERNEL)):
        times = []
        for step in range(num_steps):
            if way is not None and step % 2 == 0:
                request = copy_request(
                    pool, 2 * count, page_bytes, host, table, to_host=step % 4 == 0, way=way,
                    tuning=Tuning(16 << 20, 1 << 20, 1),
                )  # fmt: skip
                machine.post_copy(request, copy_stream)
            start, end = machine.clock(), machine.clock()
            machine.record(start, compute)
            arguments = (ctypes.c_void_p(data), step_bytes, ctypes.c_void_p(sums), num_blocks, compute)
            machine.call("gpu_check_read", *arguments)
            machine.record(end, compute)
            times.append(machine.elapsed_ms(start, end))
        machine.synchronize()
        ordered = sorted(times)
        result[name] = {"p50_ms": statistics.median(times), "p99_ms": ordered[int(len(ordered) * 0.99) - 1]}
    ratio = result["with copies"]["p99_ms"] / max(result["alone"]["p99_ms"], 1e-9)
    goal = Goal("p99 step beside parks, to alone", ratio, "x", 1.05, True)
    return Result(f"p99 of a step beside parks is {ratio:.3f} of alone", [goal], result)
