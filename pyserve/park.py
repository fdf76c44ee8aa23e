"""PARK AND RESTORE: where parked state lies, and the copies between there and the pool.

Purpose. The ledger decides which sequence leaves the pool and to which tier; this file moves its bytes and says how
that ended. It knows pages and bytes, not why.

Structure. `Parking` has the state of every parked sequence (parked.py) and one `Copy` for each sequence on its way; the
copies are posted by tiers.py, and host_room.py says what memory has room for. `landed()` is polled once per iteration,
never waits, and is the only place that reports an ending, failures included: `park` and `restore` note why they could
not post.

Common pages (R11). Leading pages that other residents hold, too, go to a block when the first of them is parked, and
are not copied again with the others.

Only what changed (R23a). When a sequence is resident again its host pages are kept. The leading ones, which are full,
will never change, so that the next park copies only those behind them. Kept pages count as free.

Room (R22). A park into memory finds the room that the planner was told of. Should there be less by then, because the
machine has run short of memory, the disk takes it, and if that cannot it is computed again.

When memory will not take the next park, what comes back last is moved to disk. Its host pages stay until the file is
written, so that a restore in between just calls the move off.

Verification (R23b). Pages are hashed as they go out and checked as they come back: all of them, or, with "sample",
every eighth and the last. Pages on disk are all hashed, since a hash costs nothing beside a disk; those that are moved
there get one on the way if they have none.

Ordering. When the engine posts a copy, the step that wrote the pages has been awaited, and neither a step that runs nor
a later one touches pages of a sequence in transfer, so a copy needs no further fence here. The ledger keeps the pages
of a park until `landed()` has reported it, and gives a restore only pages that nobody reads.

Lifetime (R20). A sequence that ends while its copy is in flight is discarded when the copy lands. A copy that is not
done at its deadline is reported as overdue, which ends the waiting but frees nothing: host memory, file and pages stay
reserved until the copy is really over, and then it is reported once more, as late. `close` waits for every copy.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from pyserve.copies import Copy, Ending, FailedEvent, Landed, slowest_s
from pyserve.disk_tier import DiskTier
from pyserve.host_arena import HostArena, SlabMaker
from pyserve.host_room import HostRoom, Outlook
from pyserve.kv_store import KvStore
from pyserve.ops import CopyStream, PageRow, page_row
from pyserve.parked import Blocks, Host, Parked
from pyserve.sequence import Sequence, Tier
from pyserve.tiers import Tiers

__all__ = ["Ending", "Landed", "Parking"]

log = logging.getLogger("pyserve.park")

_DEADLINE_S = 60.0


class Parking:
    """The tiers that hold parked state, and the copies in flight."""

    def __init__(
        self,
        kv: KvStore,
        *,
        budget_bytes: int,
        stream: CopyStream | None = None,
        disk: DiskTier | None = None,
        verify: str = "all",
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        """`verify`: off, sample or all. `deadline_s`: what a copy may take, beside some time for its size."""
        self.make_slab = SlabMaker(kv.device)
        self.arena = HostArena(kv.page_bytes, budget_bytes, self.make_slab)
        self.disk = disk
        self.tiers = Tiers(kv, self.arena, stream or kv.device.copy_stream(), disk, verify)
        self.room = HostRoom(self.tiers)
        self.deadline_s = deadline_s
        self._kv = kv
        self._parked: dict[int, Parked] = {}  # by sequence id
        self._copies: dict[int, Copy] = {}  # one at most for each sequence, by its id
        self._moves: dict[int, Copy] = {}  # from memory to disk, by sequence id; the host pages stay until it has ended
        self._overdue: dict[int, Copy] = {}  # by copy id
        self._copy_ids = itertools.count()

    # What there is

    @property
    def held_bytes(self) -> int:
        """Host memory really held."""
        return self.arena.held_bytes

    def can_pin(self) -> bool:
        """Whether parked pages get pinned memory: found out with a slab of real size, which is given back."""
        return self.arena.budget_bytes > 0 and self.make_slab.can_pin(self.arena.budget_bytes)

    @property
    def page_bytes(self) -> int:
        return self._kv.page_bytes

    @property
    def disk_bytes(self) -> int:
        return 0 if self.disk is None else self.disk.held_bytes

    @property
    def is_busy(self) -> bool:
        """A copy will land, or be overdue, in its time."""
        return bool(self._copies)

    def is_copying(self, sequence: Sequence) -> bool:
        """A copy of it will land, or be overdue."""
        return sequence.id in self._copies

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Those in flight, oldest first, then those overdue. In any thread: the loop goes on meanwhile."""
        return (*tuple(self._copies.values()), *tuple(self._overdue.values()))

    @property
    def has_overdue(self) -> bool:
        return bool(self._overdue)

    def free_pages(self) -> int:
        """Pages that may still be parked in memory."""
        return self.room.free_pages()

    def outlook(self) -> Outlook:
        """What the parks of one plan would find in memory, one after the other."""
        return self.room.outlook()

    def disk_free_pages(self) -> int:
        """Pages that may still be parked on disk."""
        return 0 if self.disk is None else self.disk.free_pages(time.monotonic())

    def parked_bytes(self, sequence: Sequence) -> int:
        """Bytes held for one parked sequence; 0 when nothing is."""
        copy = self._copies.get(sequence.id)
        parked = self._parked.get(sequence.id, None if copy is None else copy.parked)
        return 0 if parked is None else parked.total_pages * self._kv.page_bytes

    # Out and back

    def prepare(self, num_pages: int) -> None:
        """Have host memory ready for a park of `num_pages`, as far as the budget allows."""
        self.room.prepare(num_pages)

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """These are parked next, each with the room that was told before the first of them."""
        self.room.give_up_last(each.id for each in sequences)

    def park(
        self,
        sequence: Sequence,
        pages: PageRow | Items[int],
        tier: Tier = Tier.RAM,
        *,
        chain: Items[Hashable] = (),
        num_common: int = 0,
    ) -> None:
        """Post the copy of `pages`, all that the sequence has computed, to memory or disk. A row is the copy's from now
        on: nobody changes it.

        `chain`: keys of the leading pages that others may have as well. The first `num_common` are held by others now.
        """
        copy = self._new_copy(sequence, tier, len(pages), is_restore=False)
        copy.pages, copy.chain, copy.num_common = page_row(pages), chain, num_common
        kept = self.room.take_kept(sequence.id)
        if tier is Tier.DISK:
            self.tiers.release(kept)
            self.tiers.park_on_disk(copy)
            return
        if kept is not None:
            copy.parked, copy.chain, copy.num_common = kept, (), 0  # it has blocks already, or none
        else:
            copy.parked = Parked(host=Host())
            self.tiers.use_blocks(copy)
        if not self.room.take_in(copy):
            self._park_elsewhere(copy)
        self.make_slab.hurry(self.room.has_waiting)

    def restore(self, sequence: Sequence, pages: PageRow | Items[int], *, cached_pages: int) -> bool:
        """Post the copy of the parked state into `pages`, all but the first `cached_pages`, which others have or fill.
        A row is the copy's from now on.

        False when there is nothing to copy or to wait for: it is resident at once.
        """
        self._call_off_move(sequence)
        parked = self._parked.pop(sequence.id, None)
        tier = Tier.RAM if parked is None or parked.is_in_memory else Tier.DISK
        copy, pages = self._new_copy(sequence, tier, len(pages), is_restore=True), page_row(pages)
        copy.fill(pages, cached_pages, self._copies.values())
        if parked is None:
            copy.events = [FailedEvent(LookupError("there is no parked state"))]
            return True
        copy.parked = parked
        copy.num_bytes = max(0, parked.total_pages - cached_pages) * self._kv.page_bytes
        if not copy.num_bytes and not copy.behind:
            del self._copies[sequence.id]
            self._resident(copy)
            return False
        self.tiers.restore(copy, pages, cached_pages)
        return True

    @property
    def is_room_wanted(self) -> bool:
        """Memory will not take the next park, the disk can take one of those that lie there, and nothing is moving."""
        if self.disk is None or self._moves or not self._parked:
            return False
        wanted = min(self.room.next_pages, self.arena.budget_bytes // self._kv.page_bytes // 2)
        return self.free_pages() < wanted <= self.disk_free_pages()

    def can_move(self, sequence: Sequence) -> bool:
        """Whether it has pages of its own in memory."""
        parked = self._parked.get(sequence.id)
        return parked is not None and parked.host is not None and parked.num_pages > 0

    def move_to_disk(self, sequence: Sequence) -> None:
        """Post the move of what a sequence alone has in memory; until it has ended the memory still counts."""
        host = self._parked[sequence.id].host
        assert host is not None
        file, event = self.tiers.move_to_disk(host)
        num_bytes = host.num_pages * self._kv.page_bytes
        move = self._copy(sequence, Tier.DISK, num_bytes, num_bytes, is_restore=False)
        move.parked.file = file
        move.events = [event]
        self._moves[sequence.id] = move

    def discard(self, sequences: Iterable[Sequence]) -> None:
        """Give back the state of sequences that have ended, or will be computed again; now, or when its copy landed."""
        for sequence in sequences:
            if copy := self._copies.get(sequence.id):
                copy.is_discarded = True
            self._call_off_move(sequence)
            self.tiers.release(self._parked.pop(sequence.id, None))
            self.tiers.release(self.room.take_kept(sequence.id))

    def landed(self) -> list[Landed]:
        """The copies that have ended, or are overdue, since the last call. Never waits."""
        now_s = time.monotonic()
        if self.arena.is_growing and not self.arena.poll(now_s):
            for copy in self.room.turn_away():
                self._park_elsewhere(copy)
        self.room.post()
        self.make_slab.hurry(self.room.has_waiting)
        self.room.trim(now_s)
        if not self._copies and not self._overdue and not self._moves:
            return []
        endings = [(copy, copy.ending(now_s)) for copy in tuple(self._copies.values())]
        landed = [self._land(copy, ending, now_s) for copy, ending in endings if ending is not None]
        return landed + self._moved(now_s) + self._late(now_s)

    def rest(self) -> bool:
        """Nobody is served: give idle memory back. False: some is still being made, so call this and `landed` again."""
        self.make_slab.hurry(True)  # what is half made is given back when it is whole
        self.room.rest(time.monotonic())
        return not self.arena.is_growing

    def close(self) -> None:
        """Wait for every copy, at most `deadline_s`, then stop the tiers. No memory of a copy at work is given back."""
        self.make_slab.hurry(True)
        for copy in self.copies:
            for place in (copy.parked, *(share.block for share in copy.parked.shares)):
                if place.file is not None:
                    place.file.is_dropped = True
            copy.wait(self.deadline_s)
            if not copy.is_queued and not copy.is_over():
                log.error("the copy of sequence %d never ended; its memory stays taken", copy.sequence.id)
                return
        if self.disk is not None:
            self.disk.close()
        self.tiers.stream.close()
        for held in (self._copies, self._moves, self._parked, self._overdue, self.room):
            held.clear()
        self.tiers.blocks = Blocks()
        self.arena.close()

    # Parts

    def _new_copy(self, sequence: Sequence, tier: Tier, num_pages: int, *, is_restore: bool) -> Copy:
        num_ahead = num_pages * self._kv.page_bytes + sum(copy.num_bytes for copy in self._copies.values())
        copy = self._copies[sequence.id] = self._copy(sequence, tier, 0, num_ahead, is_restore=is_restore)
        return copy

    def _copy(self, sequence: Sequence, tier: Tier, num_bytes: int, num_ahead: int, *, is_restore: bool) -> Copy:
        """A copy that has time enough for `num_ahead` bytes."""
        now_s = time.monotonic()
        deadline_s = now_s + self.deadline_s + slowest_s(tier, num_ahead)
        return Copy(next(self._copy_ids), sequence, tier, is_restore, num_bytes, now_s, deadline_s)

    def _park_elsewhere(self, copy: Copy) -> None:
        """Memory has less room than when this park was planned: the next tier takes it."""
        self.tiers.release(copy.parked)
        copy.parked, copy.events = Parked(), []
        if len(copy.pages) <= self.disk_free_pages():
            copy.tier = Tier.DISK
            copy.deadline_s += slowest_s(Tier.DISK, len(copy.pages) * self._kv.page_bytes)
            self.tiers.park_on_disk(copy)
        else:
            copy.is_refused = True
            copy.events = [FailedEvent(MemoryError(f"no host memory for {len(copy.pages)} pages"))]

    def _land(self, copy: Copy, ending: Ending, now_s: float) -> Landed:
        del self._copies[copy.sequence.id]
        copy.result = ending
        self.room.leave(copy)
        is_well = ending in (Ending.DONE, Ending.CALLED_OFF)
        if not is_well:
            for share in copy.parked.shares:
                self.tiers.blocks.forget(share.block)  # it may be what went wrong
        if ending is Ending.OVERDUE:
            self._overdue[copy.id] = copy
        elif copy.is_discarded or not is_well:
            self.tiers.release(copy.parked)
        elif copy.is_restore and ending is Ending.DONE:
            self._resident(copy)
        else:
            self._parked[copy.sequence.id] = copy.parked
        if self.disk is not None and copy.tier is Tier.DISK and not (is_well or copy.is_discarded):
            self.disk.failed(now_s)
        return copy.report(ending, now_s)

    def _late(self, now_s: float) -> list[Landed]:
        late = [copy for copy in self._overdue.values() if copy.is_over()]
        for copy in late:
            del self._overdue[copy.id]
            self.tiers.release(copy.parked)
        return [copy.report(Ending.LATE, now_s) for copy in late]

    def _moved(self, now_s: float) -> list[Landed]:
        moved = []
        for move in tuple(self._moves.values()):
            ending = move.ending(now_s)
            if ending is None:
                continue
            del self._moves[move.sequence.id]
            if ending is Ending.DONE:
                parked = self._parked[move.sequence.id]
                self.tiers.empty(parked)
                parked.file = move.parked.file
                moved.append(move.report(Ending.DONE, now_s))
            else:
                self.tiers.release(move.parked)
                assert self.disk is not None
                self.disk.failed(now_s)
                log.warning("sequence %d stays in memory, for the disk failed: %s", move.sequence.id, move.error)
        return [replace(each, ending=Ending.MOVED) for each in moved]

    def _call_off_move(self, sequence: Sequence) -> None:
        if move := self._moves.pop(sequence.id, None):
            self.tiers.release(move.parked)

    def _resident(self, copy: Copy) -> None:
        """The sequence is back: what it has in memory is kept for the next park."""
        if copy.parked.is_in_memory:
            self.room.keep(copy.sequence.id, copy.parked)
        else:
            self.tiers.release(copy.parked)
