"""Parts that ask whether the device gives the right answer: register layouts, copies of pages, events."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from tests.cuda import fragments
from tests.cuda.device import AUTOMATIC, BATCHED, CALLS, KERNEL, NOT_READY, comb_table, page_hashes
from tools.gpu_check.machine import Machine, copy_request
from tools.gpu_check.results import Result, check

WAYS = {"automatic": AUTOMATIC, "calls": CALLS, "batched": BATCHED, "kernel": KERNEL, "staged": KERNEL}


def probes(machine: Machine) -> Result:
    """mma and ldmatrix: the only place where emulator and hardware could disagree silently."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for is_f16 in (0, 1):
        a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 16), (8, 16), (16, 8)))
        to_bits = (lambda x: x.astype(np.float16).view(np.uint16)) if is_f16 else fragments.bf16_bits
        to_values = (lambda bits: bits.view(np.float16)) if is_f16 else fragments.bf16_values
        a_bits, b_bits = to_bits(a), to_bits(b)
        parts = [fragments.a_fragments(a_bits), fragments.b_fragments(b_bits), fragments.c_fragments(c)]
        d = np.zeros((32, 4), np.float32)
        run_probe(machine, "probe_mma", is_f16, parts, d)
        exact = c + to_values(a_bits).astype(np.float64) @ to_values(b_bits).T.astype(np.float64)
        worst = max(worst, float(abs(d - fragments.c_fragments(exact)).max()))
    check(worst < 1e-4, f"mma of floats is off by {worst:.2g}: the register layout differs")
    a8, b8 = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (8, 32), np.int8)
    c32, d32 = rng.integers(-99, 99, (16, 8)).astype(np.int32), np.zeros((32, 4), np.int32)
    parts = [fragments.a_byte_fragments(a8), fragments.b_byte_fragments(b8), fragments.c_fragments(c32)]
    run_probe(machine, "probe_mma_s8", None, parts, d32)
    exact32 = c32 + a8.astype(np.int32) @ b8.T.astype(np.int32)
    check((d32 == fragments.c_fragments(exact32)).all(), "mma of bytes differs")
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    for is_transposed in (0, 1):
        rows, four, two = machine.upload(matrices), machine.allocate(32 * 16), machine.allocate(32 * 8)
        pointers = [ctypes.c_void_p(address) for address in (rows, four, two)]
        machine.call("probe_ldmatrix", is_transposed, *pointers, None)
        machine.synchronize()
        got = machine.read(four, np.zeros((32, 4, 2), np.uint16))
        source = matrices.transpose(0, 2, 1) if is_transposed else matrices
        check((got == fragments.loaded_matrices(source)).all(), "ldmatrix differs")
    return Result(f"mma bf16, f16, int8 and ldmatrix as written down; worst {worst:.1g}")


def run_probe(machine: Machine, name: str, kind: int | None, parts: list[np.ndarray], out: np.ndarray) -> None:
    addresses = [*(machine.upload(part) for part in parts), machine.allocate(out.nbytes)]
    arguments = [] if kind is None else [kind]
    machine.call(name, *arguments, *(ctypes.c_void_p(address) for address in addresses), None)
    machine.synchronize()
    machine.read(addresses[-1], out)


def copies(machine: Machine) -> Result:
    """Every way, both directions, several shapes of page lists; and the hashes."""
    page_bytes, num_pages = (4096 + 32, 300) if machine.is_dry else (128 * 1024 + 32, 3000)
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (num_pages, page_bytes), np.uint8)
    stream, pool = machine.stream(), machine.upload(content)
    has_batch = bool(machine.so.pyserve_cuda_can_batch())
    lists = {
        "adjacent": list(range(7, 47)),
        "comb": [base + i for base in range(10, 90, 5) for i in (0, 1)],
        "downwards": list(range(60, 20, -1)),
        "scattered": rng.permutation(num_pages)[:250].tolist(),
    }
    staging_bytes, num_done = 16 * page_bytes, 0
    staging, hashes = machine.allocate(staging_bytes), machine.allocate(8 * 250)
    for pages in lists.values():
        table, host = comb_table(pages), machine.pinned(len(pages), page_bytes)
        for way_name, way in WAYS.items():
            if way == BATCHED and not has_batch:
                continue
            staged = (staging, staging_bytes) if way_name == "staged" else (None, 0)
            host[:] = 0
            for to_host in (True, False):
                request = copy_request(
                    pool, num_pages, page_bytes, host, table, to_host=to_host, way=way, hashes=hashes, staging=staged
                )
                machine.post_copy(request, stream)
                machine.call("pyserve_cuda_stream_synchronize", stream)
                if to_host:
                    check((host == content[pages]).all(), f"{way_name}: the host's copy differs")
                    content[pages] ^= 0x33
                    host ^= 0x33
                num_done += 1
            got = machine.read(hashes, np.zeros(len(pages), np.uint64))
            check((got == page_hashes(content[pages])).all(), f"{way_name}: a hash differs")
    check((machine.read(pool, np.zeros_like(content)) == content).all(), "a page that no copy named has changed")
    return Result(f"{num_done} copies right to the byte; batched {'there' if has_batch else 'not in this driver'}")


def events(machine: Machine) -> Result:
    """R14 on the real driver: the query answers without touching the pending error, on any thread."""
    stream, event = machine.stream(), ctypes.c_void_p()
    machine.call("pyserve_cuda_event_create", ctypes.byref(event))
    num_bytes = 1 << 14 if machine.is_dry else 1 << 30
    pool, host = machine.allocate(num_bytes), machine.pinned(num_bytes)
    table = np.array([[0, 1, 1, 1, 0]], np.int32)
    if machine.is_dry:
        machine.so.emulator_slow_copies(50_000)
    machine.so.gpu_check_leave_error()
    pending = machine.so.gpu_check_pending_error()
    check(pending != 0, "no error is pending that the query could spoil")
    request = copy_request(pool, 1, num_bytes, host, table, to_host=True, way=CALLS)
    machine.post_copy(request, stream)
    machine.call("pyserve_cuda_event_record", event, stream)
    first = machine.so.pyserve_cuda_event_query(event)
    check(first == NOT_READY, f"a copy of {num_bytes >> 20} MiB was done at once: is the memory pinned?")
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(machine.so.pyserve_cuda_event_query(event)))
    thread.start()
    thread.join()
    check(seen[0] in (0, NOT_READY), f"a query on a fresh thread gives {seen[0]}")
    machine.call("pyserve_cuda_event_wait", event)
    check(machine.so.pyserve_cuda_event_query(event) == 0, "waited for and still not done")
    check(machine.so.gpu_check_take_error() == pending, "the pending error is gone")
    if machine.is_dry:
        machine.so.emulator_slow_copies(0)
    return Result("not ready is an answer, also on a thread that never used the device")
