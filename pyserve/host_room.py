"""Room in memory: how many pages a park may take there, what is kept until one takes them, and who waits for them.

A page of the budget is free, in use, or kept. In use are the pages of those who are parked or on their way, in blocks
too. Kept are pages of residents that only their next park would spare itself (R23a): its own, and those of blocks that
nobody else needs. They are given up, oldest first, when a park needs room that the budget does not have otherwise.

What the planner is told is what a park finds (R22). `free_pages` are free and kept pages. Some pages of a sequence are
in use whether it is parked or not. A park takes the difference to all its pages, whether it copies them or makes kept
ones stay: so it finds room whenever all its pages but those in use are within the free ones. Several parks of one plan
find it as well, for what is kept of those who come later is given up last, and a park to disk makes nothing stay in
memory. What they have in common is taken once: by the first of them, which makes a block of it, or makes the block
stay that is kept of it. `Outlook` tells so beforehand, park by park, and of those who wait as well.

When the arena has to grow first, a park waits in the queue, its pages still its own, and the loop goes on. What it
takes has been asked for then, and is not free.

So that this is rare, memory is there before it is needed (`prepare`): up to a quarter more than is wanted when any has
to be made, which then does for many parks that each take a little. What is wanted changes from one step to the next,
with those who are parked and come back; the most of some seconds counts, so that nothing is given back to be made
again.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items

from pyserve.copies import Copy
from pyserve.parked import Block, Blocks, Host, Parked, Share
from pyserve.tiers import Tiers

_MOST_RESERVE_BYTES = 64 << 20
_CALM_S = 10.0  # after which less is kept ready, if less was wanted all the while


class Outlook:
    """What parks into memory find there, one after the other. Nothing is changed."""

    def __init__(self, blocks: Blocks, kept: Mapping[int, Parked]) -> None:
        self._blocks = blocks
        self._kept = kept
        self._made: dict[Hashable, list[Block]] = {}  # that these parks make, by the key of the first page
        self._needed: dict[Block, int] = {}  # of the others, pages that have to stay for them

    def copy(self) -> Outlook:
        other = Outlook(self._blocks, self._kept)
        other._made = {key: [*made] for key, made in self._made.items()}
        other._needed = dict(self._needed)
        return other

    @property
    def has_blocks(self) -> bool:
        return bool(self._made) or bool(self._blocks)

    def shares(self, sequence_id: int, chain: Items[Hashable]) -> list[Share]:
        """What a sequence, whose leading pages have the keys `chain`, will use of blocks. One of whom something is kept
        goes on with the blocks that it has.
        """
        kept = self._kept.get(sequence_id)
        return self._find(chain) if kept is None else kept.shares

    def num_spared(self, shares: Iterable[Share]) -> int:
        """How many of these pages are in use, whoever uses them beside."""
        return sum(min(share.used, self._num_needed(share.block)) for share in shares)

    def park(self, sequence_id: int, chain: Items[Hashable], num_common: int) -> int:
        """It is parked now; the first `num_common` of its pages are others' as well. Returns `num_spared`."""
        shares = self.shares(sequence_id, chain)
        num_spared = self.num_spared(shares)
        self._use(shares, () if sequence_id in self._kept else chain[:num_common])
        return num_spared

    def post(self, copy: Copy) -> int:
        """Its copy is posted now. Returns how many pages it takes for that."""
        chain = copy.chain[copy.parked.num_shared :]
        shares = self._find(chain)
        num_taken = max(0, len(copy.pages) - copy.parked.total_pages - self.num_spared(shares))
        self._use(shares, chain[: max(0, copy.num_common - copy.parked.num_shared)])
        return num_taken

    def _find(self, chain: Items[Hashable]) -> list[Share]:
        return self._blocks.find(chain, is_in_memory=True, made=self._made)

    def _num_needed(self, block: Block) -> int:
        return max(block.num_needed, self._needed.get(block, 0))

    def _use(self, shares: Iterable[Share], common: Items[Hashable]) -> None:
        """As `Tiers.park_in_memory`: a block is made of those common pages that none of `shares` has."""
        first = 0
        for block, used in shares:
            self._needed[block] = max(self._num_needed(block), used)
            first += used
        if first < len(common):
            made = Block(Host(), chain=common[first:], num_needed=len(common) - first)
            self._made.setdefault(common[first], []).append(made)


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

    def outlook(self) -> Outlook:
        """For the parks of one plan. Good for as long as nothing changes here."""
        return Outlook(self._tiers.blocks, self._kept)

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
        if not self._make_room(copy):
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
            if self._make_room(copy):
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

    def _queued_pages(self, *more: Copy) -> int:
        """Pages that those who wait, and `more` behind them, have to take."""
        waiting = [copy for copy in (*self._queue, *more) if not copy.is_discarded]
        outlook = self.outlook()
        return sum(map(outlook.post, waiting))

    def _make_room(self, copy: Copy) -> bool:
        """See that pages for it, beside those promised, are there or will be, at the cost of kept ones if need be."""
        now_s = time.monotonic()
        while not self._arena.grow(self._queued_pages(copy), now_s):
            if not self._kept:
                return False
            self._tiers.release(self.take_kept(next(iter(self._kept))))
        return True


def _missing_pages(copy: Copy) -> int:
    return max(0, len(copy.pages) - copy.parked.total_pages)
