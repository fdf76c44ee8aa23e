"""THE KV POOL: page ids, who holds them, and which one to give next.

A page is in exactly one of four conditions, and the four counts always add up to `num_pages` (R12):

    held     at least one sequence uses it (`holders` > 0)
    leaving  nobody uses it, but a park's copy is still reading it (`readers` > 0)
    cached   only the prompt cache knows it; it can be evicted
    free     part of a gap

Sequences that share a prefix share its pages, so holders are counted. A page moves on by itself when its last holder,
reader and cache entry are gone; nothing else frees a page. That is the whole lifetime rule: a copy in flight keeps its
pages out of everyone's hands until it lands (R13, R15).

Free pages are kept as gaps: start -> length and end -> start, so that freeing merges with both neighbours in O(1),
and a heap of gaps by size, whose outdated entries are dropped, or put right, when they surface. A sequence grows into
the page next to its last one while that is free; otherwise, and for a new sequence, pages come from the middle of the
largest gap, so that the sequence before the gap keeps room to grow and sequences growing side by side leave few runs
(R16).

Small pages are handed out in aligned blocks of `block_len`, best a power of two. What a sequence has not filled of its
last block is as free as any page, and counted so, but others take it only when no whole block is free; then halves of
blocks come first, then quarters. A gap's largest aligned blocks are what makes it large. How many pages more would have
to be free so that nobody's block is taken apart, `num_lacking` says: as many cached prompts give way (residents.py).

Whoever has pages has them from `_numbers`, one and the same object for each page. So long lists of them are copied and
compared in a fraction of the time that walking them takes, and a park of thousands of small pages goes by stretches.

Not handled here: which page to evict (prefix.py), whom to park (planner.py), the bytes (kv_store.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

Part = range | list[int]

_LONG = 64  # pages that follow each other, from which on they are quicker changed together than one by one


class Pool:
    """`num_pages` pages, numbered from 0. Asking for more than is free is a bug of the caller."""

    def __init__(self, num_pages: int, block_len: int = 1) -> None:
        self.num_pages = num_pages
        self.block_len = block_len
        self.holders = [0] * num_pages  # sequences that use the page
        self.readers = [0] * num_pages  # park copies that read the page after its sequence let go
        self.is_cached = bytearray(num_pages)
        self.num_free = num_pages
        self.num_cached = 0  # pages that only the prompt cache holds
        self.num_leaving = 0
        self._num_whole = num_pages // block_len  # blocks that are free from end to end
        self._numbers = list(range(num_pages))
        self._gap_len = {0: num_pages}
        self._gap_start = {num_pages: 0}  # by end, exclusive
        self._largest = [self._rank(0, num_pages)]

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_cached - self.num_leaving

    @property
    def num_available(self) -> int:
        """Free pages and those that eviction can free now."""
        return self.num_free + self.num_cached

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free pages, each with one holder, best those that follow page `after`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages: list[int] = []
        if after is not None and after + 1 in self._gap_len:
            self._grow(after + 1, count, pages)
        while len(pages) < count:
            size, num_blocks, start = self._largest_gap()
            wanted = min(count - len(pages), num_blocks * size)
            num_spare = num_blocks - -(-wanted // size) if start else 0
            self._take(start, -start % size + num_spare // 2 * size, wanted, pages)
        self.num_free -= count
        return pages

    def grow(self, last: int) -> int | None:
        """The page behind `last`, with one holder, for the sequence whose last page that is. None: it is not free, or
        would be the first of a block that is not; `allocate` gives another then.

        What nearly every sequence wants that grows by a page, at a quarter of what `allocate` costs.
        """
        page = last + 1
        length = self._gap_len.get(page, 0)
        if length < 2 or (length < self.block_len and not page % self.block_len):
            return None
        del self._gap_len[page]
        if not page % self.block_len:
            self._num_whole -= 1
        self._move_front(page + 1, length - 1)
        self.holders[page] = 1
        self.num_free -= 1
        return self._numbers[page]

    def retain(self, pages: Iterable[int]) -> None:
        """One more sequence uses these pages, which are cached."""
        holders, readers = self.holders, self.readers
        for page in pages:
            if not holders[page]:
                if readers[page]:
                    self.num_leaving -= 1
                else:
                    assert self.is_cached[page], f"page {page} is free and cannot be shared"
                    self.num_cached -= 1
            holders[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """A sequence lets go of `pages`. Returns those that only the cache holds from now on, in the order given."""
        holders, readers = self.holders, self.readers
        let_go: list[int] = []
        for part in self.parts(pages):
            if _are(holders, 1, part) and _are(readers, 0, part):  # nobody else's, as most are
                _set(holders, 0, part)
                let_go += self._numbers[part[0] : part[-1] + 1]
                continue
            for page in part:
                left = holders[page] = holders[page] - 1
                if not left:
                    if readers[page]:
                        self.num_leaving += 1
                    else:
                        let_go.append(page)
        return self._let_go(let_go)

    def start_reading(self, pages: Sequence[int]) -> None:
        """A sequence lets go of `pages`, which a copy goes on reading."""
        holders, readers = self.holders, self.readers
        for part in self.parts(pages):
            if _are(holders, 1, part) and _are(readers, 0, part):
                _set(holders, 0, part)
                _set(readers, 1, part)
                self.num_leaving += len(part)
                continue
            for page in part:
                readers[page] += 1
                left = holders[page] = holders[page] - 1
                if not left:
                    self.num_leaving += 1

    def stop_reading(self, pages: Sequence[int]) -> list[int]:
        """The copy is done. Returns the pages that only the cache holds from now on, in the order given."""
        holders, readers = self.holders, self.readers
        let_go: list[int] = []
        for part in self.parts(pages):
            if _are(readers, 1, part) and _are(holders, 0, part):
                _set(readers, 0, part)
                let_go += self._numbers[part[0] : part[-1] + 1]
                continue
            for page in part:
                left = readers[page] = readers[page] - 1
                if not left and not holders[page]:
                    let_go.append(page)
        self.num_leaving -= len(let_go)
        return self._let_go(let_go)

    def cache(self, pages: Iterable[int]) -> None:
        """The prompt cache knows these pages, which a sequence holds."""
        is_cached = self.is_cached
        for page in pages:
            is_cached[page] = True

    def uncache(self, pages: Iterable[int]) -> None:
        """The prompt cache forgets these pages, whoever holds or reads them."""
        freed = []
        for page in pages:
            self.is_cached[page] = False
            if not self.holders[page] and not self.readers[page]:
                self.num_cached -= 1
                freed.append(page)
        self._free_all(freed)

    def evict(self, pages: list[int]) -> None:
        """The prompt cache forgets these pages, which nobody else holds."""
        is_cached, holders, readers = self.is_cached, self.holders, self.readers
        for page in pages:
            assert is_cached[page] and not holders[page] and not readers[page], f"page {page} is in use"
            is_cached[page] = False
        self.num_cached -= len(pages)
        self._free_all(pages)

    def num_own(self, pages: list[int]) -> int:
        """How many of a sequence's pages no other sequence uses. O(log n): who shares a page shares all before it."""
        low, high = 0, len(pages)
        while low < high:
            middle = (low + high) // 2
            if self.holders[pages[middle]] > 1:
                low = middle + 1
            else:
                high = middle
        return len(pages) - low

    def _let_go(self, pages: list[int]) -> list[int]:
        """Nobody holds or reads these pages any more, so they become cached or free. Returns those that are cached."""
        is_cached = self.is_cached
        only_cached: list[int] = []
        freed: list[int] = []
        for part in self.parts(pages):
            if isinstance(part, list):
                only_cached += [page for page in part if is_cached[page]]
                freed += [page for page in part if not is_cached[page]]
                continue
            start, stop = part.start, part.stop
            while start < stop:  # up to where those that are cached begin, or end
                end = is_cached.find(not is_cached[start], start, stop)
                end = stop if end < 0 else end
                if is_cached[start]:
                    only_cached += self._numbers[start:end]
                else:
                    self._free(start, end - start)
                start = end
        self.num_cached += len(only_cached)
        self._free_all(freed)
        return only_cached

    def parts(self, pages: Sequence[int]) -> Iterator[Part]:
        """`pages` in the order given: long stretches of pages that follow each other upwards, and what lies between."""
        numbers, num_pages, index = self._numbers, len(pages), 0
        between: list[int] = []
        while index < num_pages:
            start = end = pages[index]
            step = _LONG
            while pages[index : index + step] == numbers[end : end + step] and index + step <= num_pages:
                index, end, step = index + step, end + step, step * 2
            while step > _LONG:
                step //= 2
                if pages[index : index + step] == numbers[end : end + step] and index + step <= num_pages:
                    index, end = index + step, end + step
            if end == start:
                between += pages[index : index + _LONG]
                index += _LONG
                continue
            if between:
                yield between
                between = []
            yield range(start, end)
        if between:
            yield between

    def num_lacking(self, count: int, after: int | None) -> int:
        """How many pages more would have to be free, in whole blocks, for the sequence whose last page is `after` to
        grow by `count` without what is left of other sequences' blocks. 0: it grows into its own and whole ones.
        """
        if after is not None and (own := self._gap_len.get(after + 1, 0)):
            count -= min(own, -(after + 1) % self.block_len)
        num_blocks = -(-count // self.block_len) - self._num_whole
        return num_blocks * self.block_len if num_blocks > 0 else 0

    def _grow(self, start: int, count: int, pages: list[int]) -> None:
        """Up to `count` pages from `start` on: to the end of the block, and on through blocks that are free."""
        length, rest = self._gap_len[start], -start % self.block_len
        if length > rest:
            length -= (length - rest) % self.block_len
        if length:
            self._take(start, 0, min(count, length), pages)

    def _rank(self, start: int, length: int) -> tuple[int, int, int, int]:
        """Of a gap among others: by the size of the largest blocks in it, halves, quarters and so on if none is whole,
        and by their number.
        """
        size, end = self.block_len, start + length
        while (num_blocks := end // size - -(-start // size)) <= 0:
            size //= 2
        return -size, -num_blocks, start, length

    def _largest_gap(self) -> tuple[int, int, int]:
        """The size of the largest blocks in it, their number, and its start. There must be one."""
        while True:
            negative_size, negative_blocks, start, length = self._largest[0]
            if self._gap_len.get(start) == length:
                return -negative_size, -negative_blocks, start
            end = start + length
            rest = self._gap_start.get(end, start)
            if rest > start:  # its front was taken since, which made it no larger
                heapreplace(self._largest, self._rank(rest, end - rest))
            else:
                heappop(self._largest)

    def _take(self, start: int, offset: int, count: int, pages: list[int]) -> None:
        """Up to `count` pages from `offset` on, out of the gap at `start`, appended to `pages`."""
        length = self._gap_len.pop(start)
        count = min(count, length - offset)
        first = start + offset
        rest = length - offset - count
        self._num_whole -= self._whole(start, length) - self._whole(start, offset) - self._whole(first + count, rest)
        pages += self._numbers[first : first + count]
        self.holders[first : first + count] = [1] * count
        if not offset and count < length:
            self._move_front(first + count, length - count)
            return
        del self._gap_start[start + length]
        if offset:
            self._add_gap(start, offset)
        if rest:
            self._add_gap(first + count, rest)

    def _move_front(self, start: int, length: int) -> None:
        """What is left of a gap whose first pages were taken, as ever when a sequence grows: the heap need not know
        yet.
        """
        self._gap_len[start] = length
        self._gap_start[start + length] = start

    def _free_all(self, pages: Iterable[int]) -> None:
        for start, length in _runs(pages):
            self._free(start, length)

    def _free(self, start: int, length: int) -> None:
        self.num_free += length
        before = self._gap_start.pop(start, None)
        behind = self._gap_len.pop(start + length, None)
        if behind is not None:
            del self._gap_start[start + length + behind]
            self._num_whole -= self._whole(start + length, behind)
            length += behind
        if before is not None:
            length_before = self._gap_len.pop(before)
            self._num_whole -= self._whole(before, length_before)
            length += length_before
            start = before
        self._num_whole += self._whole(start, length)
        self._add_gap(start, length)

    def _whole(self, start: int, length: int) -> int:
        """How many whole blocks lie in so many pages from `start` on."""
        size = self.block_len
        num_blocks = (start + length) // size + -start // size
        return num_blocks if num_blocks > 0 else 0

    def _add_gap(self, start: int, length: int) -> None:
        self._gap_len[start] = length
        self._gap_start[start + length] = start
        heappush(self._largest, self._rank(start, length))
        if len(self._largest) > 4 * len(self._gap_len) + 64:
            self._largest = [self._rank(first, size) for first, size in self._gap_len.items()]
            heapify(self._largest)

    def check_integrity(self) -> None:
        """Raises AssertionError naming the first thing that does not add up."""
        free = {page for start, length in self._gap_len.items() for page in range(start, start + length)}
        assert len(free) == sum(self._gap_len.values()) == self.num_free, "gaps overlap or do not match num_free"
        cached = leaving = 0
        for page in range(self.num_pages):
            holders, readers = self.holders[page], self.readers[page]
            is_used = holders > 0 or readers > 0 or bool(self.is_cached[page])
            assert holders >= 0 and readers >= 0, f"page {page} has {holders} holders and {readers} readers"
            assert is_used != (page in free), f"page {page} is {'used and free' if is_used else 'lost'}"
            cached += not holders and not readers and bool(self.is_cached[page])
            leaving += not holders and readers > 0
        num_whole = sum(self._whole(start, length) for start, length in self._gap_len.items())
        assert num_whole == self._num_whole, f"{num_whole} blocks are free from end to end, not {self._num_whole}"
        assert cached == self.num_cached, f"num_cached is {self.num_cached}, counted {cached}"
        assert leaving == self.num_leaving, f"num_leaving is {self.num_leaving}, counted {leaving}"


class PageSet:
    """A set of pages, not made before somebody asks for one of them: a park adds thousands, and hardly anybody asks."""

    def __init__(self, others: PageSet | None = None) -> None:
        """With those of `others`."""
        self._pages: set[int] = set(others._pages) if others else set()
        self._added: list[Iterable[int]] = list(others._added) if others else []

    def add(self, pages: Sequence[int]) -> None:
        """Nobody changes `pages` afterwards."""
        self._added.append(pages)

    def __contains__(self, page: object) -> bool:
        if self._added:
            self._pages.update(*self._added)
            self._added.clear()
        return page in self._pages


def _are(values: list[int], value: int, part: Part) -> bool:
    """Whether those of a stretch all are `value`; not known of other pages."""
    return isinstance(part, range) and values[part.start : part.stop].count(value) == len(part)


def _set(values: list[int], value: int, part: Part) -> None:
    assert isinstance(part, range)
    values[part.start : part.stop] = [value] * len(part)


def _runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Start and length of each run of adjacent pages, in any order of them."""
    start = end = -1
    for page in sorted(pages):
        if page != end:
            if end > start:
                yield start, end - start
            start = page
        end = page + 1
    if end > start:
        yield start, end - start
