"""Room in memory: how many pages a park may take there, what is kept until one takes them, and who waits for them.

A page of the budget is free, in use, or kept. In use are the pages of those who are parked or on their way, in blocks
too. Kept are pages of residents that only their next park would spare itself (R23a): its own, and those of blocks that
nobody else needs. They are given up, oldest first, when a park needs room that the budget does not have otherwise.

What the planner is told is what a park finds (R22). `free_pages` are free and kept pages. `spared_pages` are those
pages of one sequence that are in use whether it is parked or not. A park takes the difference to all its pages, whether
it copies them or makes kept ones stay: so it finds room whenever all its pages but the spared ones are within the free
ones. Several parks of one plan find it as well, for what is kept of those who come later is given up last, and a park
to disk makes nothing stay in memory.

When the arena has to grow first, a park waits in the queue, its pages still its own, and the loop goes on. What it
takes has been asked for then, and is not free.

So that this is rare, memory is there before it is needed (`prepare`): up to a quarter more than is wanted when any has
to be made, which then does for many parks that each take a little. What is wanted changes from one step to the next,
with those who are parked and come back; the most of some seconds counts, so that nothing is given back to be made
again.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Items

from pyserve.copies import Copy
from pyserve.parked import Parked, num_needed
from pyserve.tiers import Tiers

_MOST_RESERVE_BYTES = 64 << 20
_CALM_S = 10.0  # after which less is kept ready, if less was wanted all the while


class HostRoom:
    """The arena of `tiers`, as parks see it."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._arena = tiers.arena
        self._kept: dict[int, Parked] = {}  # by id of the sequence, which is resident again; oldest first
        self._queue: list[Copy] = []  # parks that wait, first come first
        self.next_pages = 0  # of a park that may come next
        self._most_pages = 0  # the most that this was for some time
        self._calm_at_s = 0.0

    def free_pages(self) -> int:
        """Pages that may still be parked in memory."""
        kept = sum(each.num_pages for each in self._kept.values()) + self._tiers.blocks.kept_pages()
        return max(0, self._arena.free_pages(time.monotonic()) + kept - self._queued_pages())

    def spared_pages(self, sequence_id: int, chain: Items[Hashable]) -> int:
        """How many pages of a sequence, whose leading ones have the keys `chain`, are in use by others. One of whom
        something is kept goes on with the blocks that it has.
        """
        kept = self._kept.get(sequence_id)
        return self._tiers.common_pages(chain) if kept is None else num_needed(kept.shares)

    def prepare(self, num_pages: int) -> None:
        """Have memory ready for a park of `num_pages`, as far as the budget allows."""
        now_s = time.monotonic()
        self.next_pages = num_pages
        if num_pages >= self._most_pages or now_s >= self._calm_at_s:
            self._most_pages = num_pages
            self._calm_at_s = now_s + _CALM_S
        wanted = num_pages + self._queued_pages()
        if wanted > self._arena.idle_pages + self._arena.growing_pages:
            self._arena.grow(min(self._with_reserve(wanted), self._arena.free_pages(now_s)), now_s)

    def trim(self, now_s: float) -> None:
        """Give back what is idle for a while and not wanted."""
        if not self._queue:
            self._arena.trim(now_s, self._with_reserve(self._most_pages))

    def rest(self, now_s: float) -> None:
        """Nobody is served: give back what is idle."""
        self.next_pages = self._most_pages = 0
        self._arena.call_off()
        self._arena.trim(now_s, at_once=True)

    def _with_reserve(self, num_pages: int) -> int:
        return num_pages + min(num_pages // 4, _MOST_RESERVE_BYTES // self._arena.page_bytes)

    # What is kept

    def kept(self) -> Iterator[Parked]:
        return iter(self._kept.values())

    def keep(self, sequence_id: int, parked: Parked) -> None:
        """The sequence is resident again; `parked` is in memory."""
        self._kept[sequence_id] = parked
        for share in parked.shares:
            share.block.keep(share.used)

    def take_kept(self, sequence_id: int) -> Parked | None:
        """What is kept of a sequence, to be used or given back."""
        kept = self._kept.pop(sequence_id, None)
        for share in kept.shares if kept is not None else ():
            share.block.need(share.used)
        return kept

    def give_up_last(self, sequence_ids: Iterable[int]) -> None:
        """These are parked now, one after the other."""
        for sequence_id in sequence_ids:
            if (kept := self._kept.pop(sequence_id, None)) is not None:
                self._kept[sequence_id] = kept

    # Who waits

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue)

    def take_in(self, copy: Copy) -> bool:
        """The park takes the pages that it has no place for yet; now, or when they have been made. False: it cannot."""
        if not self._make_room(_missing_pages(copy)):
            return False
        copy.is_queued = True
        self._queue.append(copy)
        self.post()
        return True

    def post(self) -> None:
        """Post those for whom there is memory, in order."""
        while self._queue:
            copy = self._queue[0]
            if not copy.is_discarded:
                self._tiers.use_blocks(copy)  # those that came before it in the queue have made some
                extents = self._arena.take(_missing_pages(copy))
                if extents is None:
                    return
                self._tiers.park_in_memory(copy, extents)
            del self._queue[0]
            copy.is_queued = False

    def turn_away(self) -> list[Copy]:
        """The arena could not grow: those that still find no room wait no longer, and are returned."""
        queue, self._queue = self._queue, []
        turned_away = []
        for copy in queue:
            if self._make_room(_missing_pages(copy)):
                self._queue.append(copy)
            else:
                copy.is_queued = False
                turned_away.append(copy)
        return turned_away

    def leave(self, copy: Copy) -> None:
        """It waits no longer, if it did."""
        if copy in self._queue:
            self._queue.remove(copy)

    def clear(self) -> None:
        self._kept.clear()
        self._queue.clear()

    def _queued_pages(self) -> int:
        return sum(map(_missing_pages, self._queue))

    def _make_room(self, num_pages: int) -> bool:
        """See that so many pages beside those promised are idle or will be, at the cost of kept ones if need be."""
        wanted = self._queued_pages() + num_pages
        now_s = time.monotonic()
        while not self._arena.grow(wanted, now_s):
            if not self._kept:
                return False
            self._tiers.release(self.take_kept(next(iter(self._kept))))
        return True


def _missing_pages(copy: Copy) -> int:
    return max(0, len(copy.pages) - copy.parked.total_pages)
