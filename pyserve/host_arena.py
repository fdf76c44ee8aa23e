"""THE HOST ARENA: host memory for parked pages, in slabs that are made off the loop and ahead of need (R17, R22).

Structure. A slab is one buffer of whole pages. Parked state is a list of extents, stretches of pages in slabs, so that
any idle page can serve any sequence and state can grow page by page. Each page has a place for its hash beside it.

Threads. All bookkeeping is the event loop's. Making a slab, that is taking its memory, touching it and, where the
device asks for it, locking it, happens in a thread of the arena's own, and so does giving it back. `poll` adopts what
has become ready; nothing here waits, except `wait` and `close`. The first touch of memory is work for the processor,
1 ms for each MiB, that the threads of a step would notice: it is done bit by bit, with pauses unless a park waits for
it.

Budget. A slab counts from the moment it is asked for, before anything is allocated, until it is handed back: against
the flag, and against what machine and cgroup have free (R22). Idle slabs count as well. They are given back after
`idle_s`, largest first, as long as `keep_pages` stay; all at once when nobody is served, or when the machine runs
short. A slab with a page in use is never given back, and a copy in flight uses its pages.

A slab that cannot be had is one line in the log; for a while nothing more is asked for, and the pages that there are
go on being used.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from pyserve.host_memory import available_bytes
from pyserve.ops import Device, map_memory

log = logging.getLogger("pyserve.park")

_SMALLEST_SLAB = 1 << 20  # bytes
_LARGEST_SLAB = 64 << 20
_RESERVE_BYTES = 256 << 20  # left to the rest of the process when the machine, not the budget, is the limit
_MEMORY_REFRESH_S = 1.0
PROBE_BYTES = 8 << 20
_RETRY_S = 10.0  # after a slab could not be had
_PIECE_BYTES = 512 << 10  # touched at a time
_PAUSE_S = 0.002


@dataclass(eq=False, slots=True)
class Slab:
    """One buffer of `num_pages` pages: `data` uint8 [num_pages * page_bytes], `hashes` int64 [num_pages]."""

    data: torch.Tensor
    hashes: torch.Tensor
    num_pages: int
    gaps: list[tuple[int, int]]  # (first page, count), ascending, never adjacent
    num_used: int = 0
    idle_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` pages of a slab from `first` on."""

    slab: Slab
    first: int
    count: int


@dataclass(slots=True)
class _Growth:
    """A slab on its way."""

    future: Future[torch.Tensor]
    num_pages: int


@dataclass(slots=True)
class HostArena:
    """Pages of host memory within `budget_bytes`. `allocate` makes a slab of so many bytes, in the arena's thread."""

    page_bytes: int
    budget_bytes: int
    allocate: Callable[[int], torch.Tensor] = field(default_factory=lambda: allocate_slab)
    free_memory: Callable[[], int] = available_bytes
    idle_s: float = 10.0
    held_bytes: int = 0  # slabs that there are, and slabs on their way
    num_allocations: int = 0  # slabs asked for since the start; constant in the steady state
    idle_pages: int = 0
    _slabs: list[Slab] = field(default_factory=list)
    _growing: list[_Growth] = field(default_factory=list)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "pyserve-host-memory"))
    _machine_bytes: int = 0
    _machine_read_s: float = float("-inf")
    _retry_at_s: float = float("-inf")

    @property
    def growing_pages(self) -> int:
        return sum(growth.num_pages for growth in self._growing)

    @property
    def is_growing(self) -> bool:
        return bool(self._growing)

    def free_pages(self, now_s: float) -> int:
        """Pages that can be had: idle, on their way, and those that the budget and the machine still allow."""
        return self.idle_pages + self.growing_pages + self._growable_pages(now_s)

    def take(self, num_pages: int) -> list[Extent] | None:
        """`num_pages` idle pages, or None when there are not so many; then nothing is taken."""
        if num_pages > self.idle_pages:
            return None
        extents: list[Extent] = []
        missing = num_pages
        for slab in sorted(
            self._slabs, key=lambda each: -each.num_used
        ):  # full ones first: the others can be given back
            while missing and slab.gaps:
                first, count = slab.gaps[0]
                taken = min(count, missing)
                if taken == count:
                    del slab.gaps[0]
                else:
                    slab.gaps[0] = (first + taken, count - taken)
                slab.num_used += taken
                missing -= taken
                extents.append(Extent(slab, first, taken))
        self.idle_pages -= num_pages
        return extents

    def give_back(self, extents: list[Extent], now_s: float) -> None:
        """The pages are idle again."""
        for extent in extents:
            slab = extent.slab
            slab.gaps = _with_gap(slab.gaps, extent.first, extent.count)
            slab.num_used -= extent.count
            self.idle_pages += extent.count
            if not slab.num_used:
                slab.idle_since_s = now_s

    def grow(self, idle_pages: int, now_s: float) -> bool:
        """Ask for slabs, so that `idle_pages` become idle. False: the budget or the machine does not allow it."""
        missing = idle_pages - self.idle_pages - self.growing_pages
        if missing <= 0:
            return True
        if missing > self._growable_pages(now_s):
            return False
        while missing > 0:
            wanted = _slab_bytes(missing * self.page_bytes) // self.page_bytes
            num_pages = min(max(1, wanted), self._growable_pages(now_s))
            num_bytes = num_pages * self.page_bytes
            self.held_bytes += num_bytes
            self._machine_bytes -= num_bytes
            self.num_allocations += 1
            self._growing.append(_Growth(self._thread.submit(self.allocate, num_bytes), num_pages))
            missing -= num_pages
        return True

    def poll(self, now_s: float) -> bool:
        """Adopt the slabs that have become ready. False: one could not be had."""
        is_ok = True
        for growth in [each for each in self._growing if each.future.done()]:
            self._growing.remove(growth)
            try:
                data = growth.future.result()
            except (MemoryError, RuntimeError, OSError) as error:
                self.held_bytes -= growth.num_pages * self.page_bytes
                self._retry_at_s = now_s + _RETRY_S
                is_ok = False
                log.warning("no host memory for %d parked pages: %s", growth.num_pages, error)
                continue
            hashes = torch.zeros(growth.num_pages, dtype=torch.int64)
            slab = Slab(data, hashes, growth.num_pages, [(0, growth.num_pages)], idle_since_s=now_s)
            self._slabs.append(slab)
            self.idle_pages += slab.num_pages
        return is_ok

    def trim(self, now_s: float, keep_pages: int = 0, *, at_once: bool = False) -> None:
        """Give idle slabs back, largest first, those idle for `idle_s`, or all; `keep_pages` idle pages stay."""
        if not at_once and self._is_machine_short(now_s):
            at_once, keep_pages = True, 0
        if self.idle_pages <= keep_pages:
            return
        idle = [each for each in self._slabs if not each.num_used]
        for slab in sorted(idle, key=lambda each: -each.num_pages):
            if self.idle_pages - slab.num_pages < keep_pages:
                continue
            if at_once or now_s - slab.idle_since_s >= self.idle_s:
                self._slabs.remove(slab)
                self.idle_pages -= slab.num_pages
                self.held_bytes -= slab.num_pages * self.page_bytes
                self._thread.submit(_unmap, slab)

    def call_off(self) -> None:
        """Nobody wants the slabs that are on their way: those not begun are not made."""
        for growth in [each for each in self._growing if each.future.cancel()]:
            self._growing.remove(growth)
            self.held_bytes -= growth.num_pages * self.page_bytes

    def wait(self, timeout_s: float) -> bool:
        """Block until a slab has become ready, or the time is over. False: it was over. For a worker thread."""
        first = self._growing[:1]
        return len(wait([growth.future for growth in first], timeout_s).done) == len(first)

    def close(self) -> None:
        """Give everything back; nothing may be in flight."""
        self._thread.shutdown(cancel_futures=True)
        self._growing.clear()
        self._slabs.clear()
        self.held_bytes = self.idle_pages = 0

    def _growable_pages(self, now_s: float) -> int:
        if now_s < self._retry_at_s:
            return 0
        self._read_machine(now_s)
        return max(0, min(self.budget_bytes - self.held_bytes, self._machine_bytes)) // self.page_bytes

    def _is_machine_short(self, now_s: float) -> bool:
        self._read_machine(now_s)
        return self._machine_bytes <= 0

    def _read_machine(self, now_s: float) -> None:
        if now_s - self._machine_read_s > _MEMORY_REFRESH_S:
            on_the_way = self.growing_pages * self.page_bytes
            self._machine_bytes = self.free_memory() - _RESERVE_BYTES - on_the_way
            self._machine_read_s = now_s


def allocate_slab(num_bytes: int, pause: Callable[[], None] = lambda: None) -> torch.Tensor:
    """uint8 [num_bytes], page-aligned and touched, bit by bit with `pause` in between. Raises MemoryError when it does
    not fit.
    """
    try:
        memory = map_memory(num_bytes)  # the tensor keeps it; unmapped, so really given back, with it
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes of host memory: {error}") from error
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    for start in range(0, num_bytes, _PIECE_BYTES):
        slab[start : start + _PIECE_BYTES : mmap.PAGESIZE].zero_()  # the system clears what it gives
        pause()
    return slab


class SlabMaker:
    """Makes slabs as a device's copies need them. Where memory cannot be pinned, copies are slower and take turns: that
    is said once, and parking goes on (R17).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_pinned = device.pins_memory  # until the system has refused to
        self._is_urgent = threading.Event()

    def can_pin(self, most_bytes: int) -> bool:
        """Found out with a slab of real size, at most so large, which is given back."""
        if self.is_pinned:
            self._pinned(allocate_slab(min(most_bytes, PROBE_BYTES)))
        return self.is_pinned

    def hurry(self, is_urgent: bool) -> None:
        """Whether somebody waits for the slab that is being made."""
        (self._is_urgent.set if is_urgent else self._is_urgent.clear)()

    def __call__(self, num_bytes: int) -> torch.Tensor:
        slab = allocate_slab(num_bytes, self._pause)
        return self._pinned(slab) if self.is_pinned else slab

    def _pause(self) -> None:
        self._is_urgent.wait(_PAUSE_S)

    def _pinned(self, slab: torch.Tensor) -> torch.Tensor:
        try:
            return self._device.pinned(slab)
        except RuntimeError as error:
            self.is_pinned = False
            reason = str(error).split("\n", 1)[0]
            num_bytes = slab.numel()
            log.warning("%d bytes of host memory: %s; parks and restores are slower from now on", num_bytes, reason)
            return slab


def split_extents(extents: list[Extent], num_pages: int) -> tuple[list[Extent], list[Extent]]:
    """The first `num_pages` pages, and the rest."""
    head: list[Extent] = []
    for number, extent in enumerate(extents):
        if extent.count > num_pages:
            if num_pages:
                head.append(Extent(extent.slab, extent.first, num_pages))
            rest = Extent(extent.slab, extent.first + num_pages, extent.count - num_pages)
            return head, [rest, *extents[number + 1 :]]
        head.append(extent)
        num_pages -= extent.count
    return head, []


def _unmap(slab: Slab) -> None:
    """In the arena's thread, since it takes its time."""
    slab.data = slab.data.new_empty(0)


def _slab_bytes(wanted_bytes: int) -> int:
    """The next power of two, within the two limits."""
    return min(max(1 << (wanted_bytes - 1).bit_length(), _SMALLEST_SLAB), _LARGEST_SLAB)


def _with_gap(gaps: list[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """`gaps` and the pages [first, first + count), neighbours joined."""
    result: list[tuple[int, int]] = []
    for start, length in sorted([*gaps, (first, count)]):
        if result and result[-1][0] + result[-1][1] == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result
