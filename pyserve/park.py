"""PARK AND RESTORE: the copies between the pool and host memory, and the budget that they live in.

Purpose. The ledger decides which sequence leaves the pool; this file moves its bytes and says when they have arrived.
It knows pages and bytes, not why.

Structure. `Parking` holds one host buffer per parked sequence (`_hosts`) and the copies in flight (`_copies`). A park
allocates the buffer and posts one copy of all the sequence's pages to the copy stream; a restore posts the copy back
into the pages that the ledger reserved. `landed()` is polled once per iteration and never waits.

Ordering. The engine issues copies between two steps: the step that wrote the pages has been awaited, and no later step
touches pages of a sequence in transfer, so the copy thread needs no further fence here. The ledger keeps the pages of
a park until `landed()` has reported it, and gives a restore only pages that nobody reads.

Lifetime. A sequence that ends while its copy is in flight is discarded when the copy lands: `discard` marks the host
buffer and `landed` drops it. `close` waits for every copy before the pool may go.

Budget. `free_pages` is what the planner may still park: the budget less what is held, never more than the machine and
the cgroup have free. It is checked before allocating; buffers are given back the moment their sequence is resident
again.

Not handled here: a disk tier, pinned slabs, copying only what changed, page hashes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from pyserve.host_memory import available_bytes
from pyserve.kv_store import KvStore
from pyserve.ops import CopyEvent, CopyStream
from pyserve.page_runs import combs, runs
from pyserve.sequence import Sequence

_MEMORY_REFRESH_S = 1.0
_RESERVE_BYTES = 256 << 20  # left to the rest of the process when the machine, not the budget, is the limit


@dataclass(slots=True)
class Landed:
    """One copy that has ended. `is_ok` is false when it failed; then the host state is gone."""

    sequence: Sequence
    is_restore: bool
    is_ok: bool
    num_bytes: int
    copy_ms: float


@dataclass(slots=True)
class _Copy:
    sequence: Sequence
    event: CopyEvent
    is_restore: bool
    num_bytes: int
    started_s: float


class Parking:
    """The RAM tier: host buffers of parked sequences and the copies in flight."""

    def __init__(self, kv: KvStore, *, budget_bytes: int, stream: CopyStream | None = None) -> None:
        self._kv = kv
        self._budget_bytes = budget_bytes
        self._stream = stream or CopyStream()
        self._hosts: dict[int, torch.Tensor] = {}  # sequence id -> uint8 [pages * page_bytes]
        self._copies: dict[int, _Copy] = {}  # sequence id -> its one copy
        self._discarded: set[int] = set()
        self._held_bytes = 0
        self._machine_bytes = 0
        self._machine_read_s = float("-inf")

    @property
    def held_bytes(self) -> int:
        """Host memory really held, copies in flight included."""
        return self._held_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self._copies)

    def free_pages(self) -> int:
        """Pages that may still be parked in RAM."""
        now_s = time.monotonic()
        if now_s - self._machine_read_s > _MEMORY_REFRESH_S:
            self._machine_bytes = max(0, available_bytes() - _RESERVE_BYTES)
            self._machine_read_s = now_s
        return min(self._budget_bytes - self._held_bytes, self._machine_bytes) // self._kv.page_bytes

    def parked_bytes(self, sequence: Sequence) -> int:
        """Bytes held for one sequence; 0 when nothing is."""
        host = self._hosts.get(sequence.id)
        return 0 if host is None else host.numel()

    def park(self, sequence: Sequence, pages: Items[int]) -> None:
        """Post the copy of `pages` to a new host buffer.

        Raises MemoryError or RuntimeError, and then nothing is posted.
        """
        num_bytes = len(pages) * self._kv.page_bytes
        if num_bytes > self._budget_bytes - self._held_bytes:
            raise MemoryError(
                f"the park budget has {self._budget_bytes - self._held_bytes} bytes left, not {num_bytes}"
            )
        host = torch.empty(num_bytes, dtype=torch.uint8)
        self._post(sequence, pages, host, is_restore=False)
        self._hosts[sequence.id] = host
        self._held_bytes += num_bytes
        self._machine_bytes -= num_bytes

    def restore(self, sequence: Sequence, pages: Items[int], *, cached_pages: int) -> bool:
        """Post the copy of the parked state into `pages`, all but the first `cached_pages`, which hold theirs already.

        False when there is nothing to copy: the sequence is resident at once. Raises KeyError when it is not parked
        here.
        """
        host = self._hosts[sequence.id]
        num_pages = host.numel() // self._kv.page_bytes
        if num_pages <= cached_pages:
            self._drop(sequence.id)
            return False
        wanted = host[cached_pages * self._kv.page_bytes :]
        self._post(sequence, pages[cached_pages:num_pages], wanted, is_restore=True)
        return True

    def landed(self) -> list[Landed]:
        """The copies that have ended since the last call. Never waits."""
        if not self._copies:
            return []
        return [self._land(copy) for copy in tuple(self._copies.values()) if _has_ended(copy.event)]

    def discard(self, sequences: Iterable[Sequence]) -> None:
        """Give back the host state of sequences that have ended, now or when their copy has landed."""
        for sequence in sequences:
            if sequence.id in self._copies:
                self._discarded.add(sequence.id)
            else:
                self._drop(sequence.id)

    def wait_any(self, timeout_s: float) -> None:
        """Block until the oldest copy has ended. For a worker thread, never for the event loop."""
        for copy in tuple(self._copies.values())[:1]:
            copy.event.wait(timeout_s)

    def close(self) -> None:
        """Wait for every copy, then stop the copy stream."""
        self._stream.close()
        self._copies.clear()
        self._hosts.clear()
        self._held_bytes = 0

    def _post(self, sequence: Sequence, pages: Items[int], host: torch.Tensor, *, is_restore: bool) -> None:
        plan = comb_table(pages)
        started_s = time.monotonic()
        event = self._stream.copy_pages(self._kv.tensor, host, plan, to_host=not is_restore)
        self._copies[sequence.id] = _Copy(sequence, event, is_restore, host.numel(), started_s)

    def _land(self, copy: _Copy) -> Landed:
        sequence_id = copy.sequence.id
        del self._copies[sequence_id]
        is_ok = _succeeded(copy.event)
        if copy.is_restore or not is_ok or sequence_id in self._discarded:
            self._drop(sequence_id)
        self._discarded.discard(sequence_id)
        copy_ms = (time.monotonic() - copy.started_s) * 1e3
        return Landed(copy.sequence, copy.is_restore, is_ok, copy.num_bytes, copy_ms)

    def _drop(self, sequence_id: int) -> None:
        host = self._hosts.pop(sequence_id, None)
        if host is not None:
            self._held_bytes -= host.numel()


def comb_table(pages: Items[int]) -> torch.Tensor:
    """The copy of `pages` in list order as int32 [combs, 5]: start, run_pages, stride_pages, count, list_offset."""
    table = [(c.start, c.run_pages, c.stride_pages, c.count, c.list_offset) for c in combs(runs(pages))]
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 5)


def _has_ended(event: CopyEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:  # failed is an end, too
        return True


def _succeeded(event: CopyEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return False
