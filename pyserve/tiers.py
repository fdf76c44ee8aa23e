"""The tiers: parked pages are written to memory or disk, and read back.

`Parking` knows who is parked and what is in flight; this file knows where the pages of one state lie, posts the copies
to and from there, and gives the room back. Nothing here waits.
"""

from __future__ import annotations

import time

from pyserve.copies import Copy, FailedEvent, no_pages
from pyserve.disk_tier import DiskEvent, DiskTier, ParkFile
from pyserve.host_arena import Extent, HostArena, split_extents
from pyserve.kv_store import KvStore
from pyserve.ops import CopyStream, PageRow, comb_table
from pyserve.parked import Block, Blocks, Event, Host, Parked, Place, Share
from pyserve.sequence import Tier


class Tiers:
    """Host arena and disk, and the stream that copies between them and the pool."""

    def __init__(
        self, kv: KvStore, arena: HostArena, stream: CopyStream, disk: DiskTier | None = None, verify: str = "all"
    ) -> None:
        """`verify`: off, sample or all."""
        self.arena = arena
        self.disk = disk
        self.stream = stream
        self.blocks = Blocks()  # what several parked sequences have in common
        self._kv = kv
        self._verify = verify

    def park_in_memory(self, copy: Copy, extents: list[Extent]) -> None:
        """The copy of a park into memory, with `extents` for the pages that it has no place for yet."""
        parked, pages, salt = copy.parked, copy.pages, copy.sequence.id
        first = parked.num_shared
        num_new = max(0, copy.num_common - first)
        if num_new:
            block = Block(Host(), chain=copy.chain[first : first + num_new])
            taken, extents = split_extents(extents, num_new)
            assert block.host is not None
            block.host.add(taken)
            block.host.choose_hashes(0, self._verify, salt)
            self._add_block(copy, block)
            self._post(block.events, block.host, pages[first : first + num_new], 0, to_host=True)
            copy.events += block.events
            first += num_new
        host = parked.host
        assert host is not None
        host.add(extents)
        start = min(host.full_pages, len(pages) - first)
        host.choose_hashes(start, self._verify, salt)
        copy.num_bytes = (num_new + len(pages) - first - start) * self._kv.page_bytes
        host.full_pages = copy.sequence.num_computed // self._kv.page_size - first
        self._post(copy.events, host, pages[first:], start, to_host=True)
        copy.pages, copy.chain = no_pages(), ()

    def park_on_disk(self, copy: Copy) -> None:
        """The copy of a park to disk."""
        assert self.disk is not None
        self.use_blocks(copy)
        pages, first = copy.pages, copy.parked.num_shared
        is_hashed = self._verify != "off"
        if copy.num_common > first:
            file, event = self.disk.write(pages[first : copy.num_common], is_hashed=is_hashed)
            self._add_block(copy, Block(file=file, chain=copy.chain[first : copy.num_common], events=[event]))
            copy.events.append(event)
        if len(pages) > copy.parked.num_shared:
            copy.parked.file, event = self.disk.write(pages[copy.parked.num_shared :], is_hashed=is_hashed)
            copy.events.append(event)
        copy.num_bytes = (len(pages) - first) * self._kv.page_bytes
        copy.pages, copy.chain = no_pages(), ()

    def move_to_disk(self, host: Host) -> tuple[ParkFile, DiskEvent]:
        """Post the copy of what lies in memory to disk; it must stay there until that has ended."""
        assert self.disk is not None
        extents = [extent for extent, _ in host.stretches(0, host.num_pages)]
        return self.disk.write_extents(extents, is_hashed=self._verify != "off")

    def use_blocks(self, copy: Copy) -> None:
        """Pages that another park has copied, or is copying, need no copy of their own."""
        if not copy.chain:
            return
        is_in_memory = copy.tier is Tier.RAM
        for share in self.blocks.find(copy.chain[copy.parked.num_shared :], is_in_memory=is_in_memory):
            copy.parked.shares.append(share)
            share.block.add_use(share.used)
            copy.events += share.block.events

    def _add_block(self, copy: Copy, block: Block) -> None:
        block.add_use(block.num_pages)
        copy.parked.shares.append(Share(block, block.num_pages))
        self.blocks.add(block)

    def restore(self, copy: Copy, pages: PageRow, cached_pages: int) -> None:
        """Post the copy of a state into `pages`, all but the first `cached_pages`."""
        first = 0
        for place, num_pages in (*copy.parked.shares, (copy.parked, copy.parked.num_pages)):
            self._fetch(copy, place, pages[first : first + num_pages], max(0, cached_pages - first))
            first += num_pages

    def _fetch(self, copy: Copy, place: Place, pages: PageRow, start: int) -> None:
        """The pages of `place` from number `start` on, into those of `pages`."""
        if start >= len(pages):
            return
        num_before = len(copy.events)
        if place.file is not None:
            assert self.disk is not None
            copy.events.append(self.disk.read(place.file, pages[start:], start))
        elif place.host is not None:
            self._post(copy.events, place.host, pages, start, to_host=False)
        copy.sources += [place] * (len(copy.events) - num_before)

    def _post(self, events: list[Event], host: Host, pages: PageRow, start: int, *, to_host: bool) -> None:
        """Of `pages`, in the order of the host's, those from `start` on: one copy for each stretch of host memory. What
        cannot be posted is noted, and what is posted runs out.
        """
        for extent, number in host.stretches(start, len(pages)):
            table = comb_table(pages[number : number + extent.count], extent.first)
            hashes = None if self._verify == "off" else extent.slab.hashes
            try:
                event = self.stream.copy_pages(self._kv.tensor, extent.slab.data, table, to_host, hashes=hashes)
            except (RuntimeError, ValueError, MemoryError) as error:
                events.append(FailedEvent(error))
                return
            events.append(event)

    def release(self, parked: Parked | None) -> None:
        """Nobody wants this state any more. What it has in common with others stays with them."""
        if parked is None:
            return
        self.empty(parked)
        for block, used in parked.shares:
            block.end_use(used)
            if not block.num_users:
                self.blocks.forget(block)
                self.empty(block)
            elif block.host is not None and block.num_used < block.num_pages:
                self.arena.give_back(block.host.shorten(block.num_used), time.monotonic())
                block.chain = block.chain[: block.num_used]
        parked.shares = []

    def empty(self, place: Place) -> None:
        """Give back its memory or its file."""
        if place.host is not None:
            self.arena.give_back(place.host.extents, time.monotonic())
        if place.file is not None and self.disk is not None:
            self.disk.drop(place.file)
        place.host = place.file = None
