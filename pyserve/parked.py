"""Parked state: where the pages of a sequence lie while it is not in the pool, and the pages that several share (R11).

A `Place` is a row of pages in the host arena or in a file of the disk tier. The state of a sequence is a place of its
own, behind blocks: places that hold leading pages for every sequence that has them in common. The first park that finds
its leading pages held by others makes a block of them; the parks of the others use it and copy only what lies behind.
A block goes with the last state that uses it, and each of its pages with the last that uses this one. Which pages are
the same is said by keys, one for each page, that stand for everything up to the end of that page.

Pages that only residents use, of whom a copy is kept (R23a), can be had when memory is short: `Block.num_needed` says
where these begin. A park that uses some of them makes them stay, as if it had taken room for them.

Whoever uses a block whose copy is still in flight waits for that copy, too, and fails with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from pyserve.disk_tier import ParkFile
from pyserve.host_arena import Extent, split_extents

_NONE_MADE: Mapping[Hashable, Items[Block]] = MappingProxyType({})
_SAMPLED = 8  # one page in so many is hashed with "sample"


class Event(Protocol):
    """What a copy stream or the disk tier gives for something that it does."""

    @property
    def copy_s(self) -> float: ...

    def query(self) -> bool:
        """Whether it is done. Never waits. Raises CopyFailed when it has ended and failed."""

    def wait(self, timeout_s: float | None = None) -> bool: ...


@dataclass(slots=True)
class Host:
    """Parked pages in the host arena, in the order of the sequence's pages."""

    extents: list[Extent] = field(default_factory=list)
    num_pages: int = 0
    full_pages: int = 0  # leading pages that hold all their cells, so that they never change again (R23a)

    def add(self, extents: list[Extent]) -> None:
        self.extents += extents
        self.num_pages += sum(extent.count for extent in extents)

    def shorten(self, num_pages: int) -> list[Extent]:
        """Let go of all but the first `num_pages`. Returns where these were."""
        self.extents, rest = split_extents(self.extents, num_pages)
        self.num_pages = num_pages
        return rest

    def stretches(self, start: int, stop: int) -> list[tuple[Extent, int]]:
        """The pages [start, stop) as extents, each with the number of its first page."""
        found = []
        number = 0
        for extent in self.extents:
            low, high = max(start, number), min(stop, number + extent.count)
            if low < high:
                found.append((Extent(extent.slab, extent.first + low - number, high - low), low))
            number += extent.count
        return found

    def choose_hashes(self, start: int, verify: str, salt: int) -> None:
        """Mark the pages from `start` on that are hashed on their way out. `salt` spreads a sample over the places."""
        for extent, number in self.stretches(start, self.num_pages):
            marks = extent.slab.hashes.numpy()[extent.first : extent.first + extent.count]
            marks[:] = int(verify == "all")
            if verify == "sample":
                marks[(salt - number) % _SAMPLED :: _SAMPLED] = 1
                if number + extent.count == self.num_pages:
                    marks[-1] = 1


@dataclass(eq=False, slots=True)
class Place:
    """A row of pages in memory, or in a file; with neither it is empty."""

    host: Host | None = None
    file: ParkFile | None = None

    @property
    def num_pages(self) -> int:
        return self.host.num_pages if self.host is not None else self.file.num_pages if self.file is not None else 0


@dataclass(eq=False, slots=True)
class Block(Place):
    """Pages that several sequences have in common; each uses so many of the first of them. `events`: those of the copy
    that fills it.
    """

    chain: Items[Hashable] = ()
    events: list[Event] = field(default_factory=list)
    num_needed: int = 0  # leading pages that somebody uses who is parked, or on the way
    _uses: list[int] = field(default_factory=list)  # the pages of each of these
    _kept_uses: list[int] = field(default_factory=list)  # and of those who are resident again

    @property
    def num_users(self) -> int:
        return len(self._uses) + len(self._kept_uses)

    @property
    def num_used(self) -> int:
        """Leading pages that anybody uses."""
        return max((self.num_needed, *self._kept_uses))

    def add_use(self, num_pages: int) -> None:
        self._uses.append(num_pages)
        self.num_needed = max(self.num_needed, num_pages)

    def end_use(self, num_pages: int) -> None:
        self._uses.remove(num_pages)
        self.num_needed = max(self._uses, default=0)

    def keep(self, num_pages: int) -> None:
        """One who uses so many is resident again."""
        self.end_use(num_pages)
        self._kept_uses.append(num_pages)

    def need(self, num_pages: int) -> None:
        """One of whom so many are kept is parked again, or they are given up."""
        self._kept_uses.remove(num_pages)
        self.add_use(num_pages)


class Share(NamedTuple):
    """The first `used` pages of a block."""

    block: Block
    used: int


@dataclass(eq=False, slots=True)
class Parked(Place):
    """The state of one sequence: pages of blocks, then pages of its own."""

    shares: list[Share] = field(default_factory=list)

    @property
    def num_shared(self) -> int:
        return sum(share.used for share in self.shares)

    @property
    def total_pages(self) -> int:
        return self.num_shared + self.num_pages

    @property
    def is_in_memory(self) -> bool:
        return self.file is None and all(share.block.file is None for share in self.shares)


class Blocks:
    """The blocks that further parks may use."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[Block]] = {}  # by the key of the first page
        self._blocks: set[Block] = set()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def find(
        self, chain: Items[Hashable], *, is_in_memory: bool, made: Mapping[Hashable, Items[Block]] = _NONE_MADE
    ) -> list[Share]:
        """The longest row of blocks that `chain` begins with. `is_in_memory`: for a park into memory. One to disk uses
        what has to stay in memory as well, and makes nothing stay there that could be had. `made`: blocks that will
        be there by then, by the key of the first page.
        """
        shares: list[Share] = []
        start = 0
        while start < len(chain):
            fitting = []
            for block in (*self._by_key.get(chain[start], ()), *made.get(chain[start], ())):
                num_same = _num_same(block.chain, chain, start)
                if block.host is not None:
                    fitting.append(Share(block, num_same if is_in_memory else min(num_same, block.num_needed)))
                elif not is_in_memory:
                    fitting.append(Share(block, num_same))
            best = max(fitting, key=_used, default=None)
            if best is None or not best.used:
                break
            shares.append(best)
            start += best.used
        return shares

    def add(self, block: Block) -> None:
        self._by_key.setdefault(block.chain[0], []).append(block)
        self._blocks.add(block)

    def forget(self, block: Block) -> None:
        """No further park uses it. Harmless when repeated."""
        if block in self._blocks:
            self._blocks.remove(block)
            same_start = self._by_key[block.chain[0]]
            same_start.remove(block)
            if not same_start:
                del self._by_key[block.chain[0]]

    def kept_pages(self) -> int:
        """Pages in memory that only sequences use which are resident again."""
        return sum(each.num_pages - each.num_needed for each in self._blocks if each.host is not None)


def _used(share: Share) -> int:
    return share.used


def _num_same(block: Items[Hashable], chain: Items[Hashable], start: int) -> int:
    limit = min(len(block), len(chain) - start)
    return next((number for number in range(limit) if block[number] != chain[start + number]), limit)
