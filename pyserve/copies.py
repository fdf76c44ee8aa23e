"""One sequence's copy in flight: the events that it consists of, and how it ends.

A restore may share pages that another restore is filling (R11): it ends after that one. If that one fails, it is
called off: its own parked state is as it was, and can be brought in whole, unless what failed is a place that both use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from pyserve.ops import CopyFailed, PageMismatch, PageRow
from pyserve.parked import Event, Parked, Place
from pyserve.sequence import Sequence, Tier

log = logging.getLogger("pyserve.park")

_SLOW_COPY_BYTES_PER_S = 100e6
_SLOW_DISK_BYTES_PER_S = 5e6


class Ending(Enum):
    """How a copy ended, or that nobody waits for it any more."""

    DONE = "done"
    FAILED = "failed"
    NO_ROOM = "no room"  # no tier took a park: nothing was copied
    MISMATCH = "mismatch"  # a page was not what its hash says
    OVERDUE = "overdue"  # its time is over and it may still be reading or writing its pages
    LATE = "late"  # a copy that was overdue has ended: nothing touches its pages any more
    MOVED = "moved"  # parked state went from memory to disk
    CALLED_OFF = "called off"  # what it was to share did not come, and its own state is as it was


def no_pages() -> PageRow:
    return np.empty(0, dtype=np.int32)


@dataclass(eq=False, slots=True)
class Copy:
    """One sequence's way out of the pool, or back. It owns the state at its other end."""

    id: int
    sequence: Sequence
    tier: Tier
    is_restore: bool
    num_bytes: int
    started_s: float
    deadline_s: float
    parked: Parked = field(default_factory=Parked)
    pages: PageRow = field(default_factory=no_pages)  # of a park that waits for memory: what to copy; of a restore:
    # what it fills. The copy's own: whose pages they were may have gone from its slot, and its row of the page table.
    chain: Items[Hashable] = ()  # and the keys of the leading ones that others may have, too
    num_common: int = 0  # how many of them others hold now
    events: list[Event] = field(default_factory=list)
    sources: list[Place] = field(default_factory=list)  # of a restore: where each of these copies from
    behind: Items[Copy] = ()  # whose pages it shares: it ends after they have, and well only if all of them do
    result: Ending | None = None  # how it ended, once that is reported
    is_queued: bool = False  # nothing is posted yet
    is_discarded: bool = False  # the sequence has ended
    is_refused: bool = False  # no tier has room for it
    error: str = ""
    is_mismatch: bool = False
    is_query_failure_told: bool = False

    @property
    def copy_s(self) -> float:
        return sum(event.copy_s for event in self.events)

    def fill(self, pages: PageRow, num_shared: int, others: Iterable[Copy]) -> None:
        """It is to fill `pages`, all but the first `num_shared`, behind those of `others` that fill some of these."""
        shared = pages[:num_shared]
        # Who shares a page shares all before it, so the first that another fills tells.
        self.behind = [other for other in others if other.is_restore and len(other.pages) and other.pages[0] in shared]
        self.deadline_s = max((self.deadline_s, *(other.deadline_s for other in self.behind)))
        self.pages = pages[num_shared:]

    def is_over(self) -> bool:
        """Nothing touches its pages or its state any more. Never waits."""
        return not self.is_queued and all(self._has_ended(event) for event in self.events)

    def ending(self, now_s: float) -> Ending | None:
        """None: it goes on. Never waits."""
        if self.is_over() and all(other.result is not None for other in self.behind):
            if self.is_mismatch:
                return Ending.MISMATCH
            if self.error:
                return Ending.NO_ROOM if self.is_refused else Ending.FAILED
            return self._ending_behind()
        if now_s < self.deadline_s:
            return None
        if not self.error:
            self.error = f"not done after {now_s - self.started_s:.0f} s"
        return Ending.FAILED if self.is_queued else Ending.OVERDUE

    def _ending_behind(self) -> Ending:
        """How it ends if nothing is wrong with its own copy."""
        failed = [other for other in self.behind if other.result is not Ending.DONE]
        if not failed:
            return Ending.DONE
        other = failed[0]
        self.error = f"that of sequence {other.sequence.id}, whose pages it shares: {other.error}"
        places = [self.parked, *(share.block for share in self.parked.shares)]
        is_suspect = any(each.result is Ending.OVERDUE or each.found_bad(places) for each in failed)
        return Ending.FAILED if is_suspect else Ending.CALLED_OFF

    def found_bad(self, places: Items[Place]) -> bool:
        """Whether what it copied from one of these did not come, or not as it went. For one that has ended."""
        used = [event for event, source in zip(self.events, self.sources, strict=False) if source in places]
        return any(map(_has_failed, used))

    def report(self, ending: Ending, now_s: float) -> Landed:
        """What the engine is told of it."""
        num_bytes = self.num_bytes if ending is Ending.DONE else 0
        copy_ms = (now_s - self.started_s) * 1e3
        return Landed(
            self.sequence, self.is_restore, ending, num_bytes, copy_ms, self.id, self.tier, self.error, self.copy_s
        )

    def wait(self, timeout_s: float) -> bool:
        """Block until it has ended, with those that it is behind, or the time is over; whether it has. For a worker
        thread.
        """
        until_s = time.monotonic() + timeout_s
        copies = (self, *(other for other in self.behind if other.result is None))
        for copy in copies:
            for event in copy.events:
                try:
                    if not event.wait(max(0.0, until_s - time.monotonic())):
                        return False
                except RuntimeError:  # `ending` says what it means
                    continue
        return not any(copy.is_queued for copy in copies)

    def _has_ended(self, event: Event) -> bool:
        try:
            return event.query()
        except CopyFailed as error:
            self.error = str(error)
            self.is_mismatch = self.is_mismatch or isinstance(error, PageMismatch)
            return True
        except Exception as error:  # no answer: the copy may still be at work
            if not self.is_query_failure_told:
                log.error("cannot tell whether the copy of sequence %d is done: %s", self.sequence.id, error)
            self.is_query_failure_told = True
            return False


def _has_failed(event: Event) -> bool:
    try:
        return not event.query()
    except RuntimeError:
        return True


@dataclass(frozen=True, slots=True)
class Landed:
    """What has become of one copy. Bytes are those that were moved."""

    sequence: Sequence
    is_restore: bool
    ending: Ending
    num_bytes: int
    copy_ms: float  # from the moment it was asked for
    copy_id: int
    tier: Tier
    error: str = ""
    copy_s: float = 0.0  # the copy alone, without the time that it waited


def slowest_s(tier: Tier, num_bytes: int) -> float:
    """How long a copy of so many bytes may take on a machine that still works."""
    return num_bytes / (_SLOW_DISK_BYTES_PER_S if tier is Tier.DISK else _SLOW_COPY_BYTES_PER_S)


class FailedEvent:
    """Stands for a copy that could not be posted."""

    copy_s = 0.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def query(self) -> bool:
        raise CopyFailed(str(self._error) or type(self._error).__name__)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.query()
