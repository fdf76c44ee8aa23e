"""Between ledger and tiers: starts the copies that a plan asks for, and tells ledger, clients and log how they ended.

Whatever goes wrong with a copy ends here as the same thing: one line in the log, and the sequence is computed again
(R23, R23b). Nothing is continued on state that is not known to be right, and no sequence ends for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Items

from pyserve.host_room import Outlook
from pyserve.ledger import Ledger
from pyserve.ops import PageRow
from pyserve.park import Ending, Landed, Parking
from pyserve.plan import Park, Plan, Restore
from pyserve.pool import Part
from pyserve.rates import Rates
from pyserve.sequence import Sequence, State, Tier
from pyserve.task import Task
from pyserve.types import Counters, Event, Preempted, Resumed

log = logging.getLogger("pyserve.park")


class PlannedParks:
    """What memory spares the parks of one plan, one after the other (R11)."""

    def __init__(self, ledger: Ledger, outlook: Outlook) -> None:
        self._ledger = ledger
        self._outlook = outlook

    def copy(self) -> PlannedParks:
        return PlannedParks(self._ledger, self._outlook.copy())

    def num_spared(self, sequence: Sequence) -> int:
        """How many of its pages lie in memory to stay, or will by then."""
        if not self._outlook.has_blocks:
            return 0
        return self._outlook.num_spared(self._outlook.shares(sequence.id, self._ledger.known_pages(sequence)))

    def park(self, sequence: Sequence) -> int:
        """The same, and it is parked from now on."""
        return self._outlook.park(sequence.id, *_chain_of(self._ledger, sequence, has_blocks=self._outlook.has_blocks))


def _chain_of(ledger: Ledger, sequence: Sequence, *, has_blocks: bool) -> tuple[Items[Hashable], int]:
    """Keys of the leading pages of one that is parked, and how many of them others hold. Where there are no blocks and
    none will be made the keys would be gathered for nothing, page by page.
    """
    num_common = ledger.num_common(sequence)
    return ledger.known_pages(sequence) if num_common or has_blocks else (), num_common


class Transfers:
    """Parks and restores of the engine's tasks. `pages_of` gives a copy of a sequence's row of the page table, which is
    made of the parts of its pages where it is not known yet. `post` queues an event for a task's client.

    `rates` are measured here and by the steps, and say which tier is not worth its copies.
    """

    def __init__(
        self,
        ledger: Ledger,
        parking: Parking,
        pages_of: Callable[[Sequence, Iterable[Part]], PageRow],
        tasks: Mapping[int, Task],
        counters: Counters,
        post: Callable[[Task, Event], None],
    ) -> None:
        self._ledger = ledger
        self._parking = parking
        self._pages_of = pages_of
        self._tasks = tasks
        self._counters = counters
        self._post = post
        self._page_size = ledger.limits.page_size
        self.rates = Rates(parking.page_bytes, self._page_size)
        self._decoding: list[Sequence] = []  # as the ledger's was when it was looked at
        self._most_pages = 0  # that one of those who run can ever hold

    def collect(self) -> None:
        """Take note of every copy that has ended. Never waits."""
        for landed in self._parking.landed():
            self._land(landed)

    def is_copying(self, sequence: Sequence) -> bool:
        """A copy of it will land, or be overdue."""
        return self._parking.is_copying(sequence)

    def plan(self, now_s: float) -> Plan:
        """What the ledger would do now, with the room that the tiers have."""
        room, disk_room = self._parking.free_pages(), self._parking.disk_free_pages()
        return self._ledger.plan(now_s * 1e3, room, disk_room, self.rates.slow_tiers(now_s), self.open_outlook)

    def start(self, parks: Items[Park], restores: Items[Restore]) -> None:
        """Post the copies of an applied plan."""
        self._parking.expect(park.sequence for park in parks)
        for park in parks:
            self._start_park(park)
        for restore in restores:
            self._start_restore(restore)

    def open_outlook(self) -> PlannedParks:
        """For the parks of one plan."""
        return PlannedParks(self._ledger, self._parking.outlook())

    def recover(self) -> None:
        """The engine failed between a plan and its copies, and everybody has ended: nobody waits for what is not
        under way.
        """
        for sequence in self._ledger.departing():
            if not self._parking.is_copying(sequence):
                self._ledger.copy_lost(sequence)

    def prepare(self) -> None:
        """Have host memory ready before a park needs it: once the pool is half full, as much as the smallest resident
        can hold at most. Where parks are forced, it need not be the smallest that is parked next.
        """
        ledger = self._ledger
        if not ledger.limits.is_parking_on:
            return
        num_running = ledger.num_running
        num_available = ledger.free_pages + ledger.cached_pages
        is_near = ledger.limits.preempt_every > 0 or (num_running > 1 and num_available * 2 < ledger.limits.num_pages)
        self._parking.prepare(self._pages_of_next() if is_near and num_running else 0)
        if self._parking.is_room_wanted:
            self._move_one_to_disk()

    def _pages_of_next(self) -> int:
        """The most that a park which comes next can take."""
        ledger = self._ledger
        if ledger.decoding is not self._decoding or ledger.num_running != len(self._decoding):
            self._decoding = ledger.decoding  # somebody came or went, or computes a prompt
            cells = max([each.max_cells for each in ledger.running()])
            self._most_pages = -(-cells // self._page_size)
        return min(self._most_pages, -(-ledger.limits.num_pages // ledger.num_running))

    def _move_one_to_disk(self) -> None:
        """The one that comes back last."""
        in_memory = [each for each in self._ledger.parked() if self._parking.can_move(each)]
        if in_memory and Tier.DISK not in self.rates.slow_tiers(time.monotonic()):
            self._parking.move_to_disk(in_memory[-1])

    def _land(self, landed: Landed) -> None:
        counters, sequence = self._counters, landed.sequence
        task = self._tasks.get(sequence.id)  # None: ended meanwhile
        if landed.ending is Ending.LATE:
            self._ledger.overdue_landed(landed.copy_id)
            log.info("an overdue copy of sequence %d has ended after %.0f ms", sequence.id, landed.copy_ms)
            return
        if landed.ending is Ending.MOVED:
            counters.moved_bytes += landed.num_bytes
            self._ledger.moved_to_disk(sequence)
            return
        if landed.ending is Ending.CALLED_OFF:
            log.info("sequence %d stays parked for now: the copy failed (%s)", sequence.id, landed.error)
            self._ledger.restore_failed(sequence, kept_in=landed.tier)
            return
        self._count(landed)
        if landed.ending is Ending.NO_ROOM and task is not None:
            log.info(
                "request=%s index=%d: no tier has room for it any more (%s); it will be computed again",
                task.request_id, sequence.index, landed.error,
            )  # fmt: skip
        elif landed.ending is not Ending.DONE and task is not None:
            log.error(
                "request=%s index=%d: its copy %s failed (%s); it will be computed again",
                task.request_id, sequence.index,
                f"{'from' if landed.is_restore else 'to'} {landed.tier}", landed.error,
            )  # fmt: skip
        if landed.ending is Ending.OVERDUE:
            self._ledger.copy_overdue(sequence, landed.copy_id, time.monotonic() * 1e3)
            return
        is_ok = landed.ending is Ending.DONE
        if landed.is_restore:
            if is_ok and landed.num_bytes:
                self.rates.restore[landed.tier].add(landed.num_bytes, landed.copy_s, time.monotonic())
            counters.restored_bytes += landed.num_bytes
            (self._ledger.restore_landed if is_ok else self._ledger.restore_failed)(sequence)
            if task is not None and sequence.state is State.RUNNING:  # else what it shares is not there: parked again
                self._resumed(task, landed.num_bytes, landed.copy_ms)
        else:
            counters.parked_bytes += landed.num_bytes
            (self._ledger.park_landed if is_ok else self._ledger.park_failed)(sequence)
            if is_ok and landed.tier is Tier.DISK:  # which may have taken it in the place of memory
                self._ledger.moved_to_disk(sequence)
            if task is not None:
                task.log_park(
                    landed.tier if is_ok else Tier.RECOMPUTE, landed.num_bytes, landed.copy_ms, self._ledger.free_pages
                )

    def _count(self, landed: Landed) -> None:
        counters = self._counters
        counters.observe("restore_copy_s" if landed.is_restore else "park_copy_s", landed.copy_ms / 1e3)
        if landed.ending is Ending.MISMATCH:
            counters.hash_mismatches += 1
        elif landed.ending not in (Ending.DONE, Ending.NO_ROOM):
            counters.copies_failed += 1

    def _start_park(self, park: Park) -> None:
        sequence = park.sequence
        task = self._tasks[sequence.id]
        task.preempted(time.monotonic(), park.reason, self._ledger.free_pages)
        self._counters.preempts += 1
        self._post(task, Preempted(sequence.index))
        if park.tier.is_copy:
            num_pages = -(-sequence.num_computed // self._page_size)
            chain, num_common = _chain_of(self._ledger, sequence, has_blocks=bool(self._parking.tiers.blocks))
            pages = self._row_of(sequence)[:num_pages]
            self._parking.park(sequence, pages, park.tier, chain=chain, num_common=num_common)
        else:
            self._parking.discard([sequence])  # what is kept of an earlier park
            task.log_park(park.tier, 0, 0.0, self._ledger.free_pages)

    def _row_of(self, sequence: Sequence) -> PageRow:
        return self._pages_of(sequence, self._ledger.page_parts(sequence))

    def _start_restore(self, restore: Restore) -> None:
        sequence = restore.sequence
        task = self._tasks[sequence.id]
        if restore.tier is Tier.RECOMPUTE:  # its pages were dropped: it runs at once and computes them again
            self._counters.recomputes += 1
            self._parking.discard([sequence])
        elif self._parking.restore(sequence, self._row_of(sequence), cached_pages=restore.cached_pages):
            return
        else:
            self._ledger.restore_landed(sequence)
        self._resumed(task, 0, 0.0)

    def _resumed(self, task: Task, num_bytes: int, copy_ms: float) -> None:
        self._counters.resumes += 1
        stall_s = task.resumed(time.monotonic(), num_bytes, copy_ms, self._ledger.free_pages)
        self._counters.observe("preempted_s", stall_s)
        self._post(task, Resumed(task.sequence.index))
