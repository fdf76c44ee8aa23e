"""THE PROMPT CACHE: which full pages hold which tokens after which tokens.

A tree: each node is one full page, its children are the pages that may follow. Matching a prompt walks down from the
root, one look at one table a step: its keys are the page before and the tokens in this one, and a page is in the tree
once at most, so that a key is a place in it. Keys are compared as tokens, so no two prompts are ever confused.

The cache knows pages, it does not keep them from anyone: a page that no sequence holds is there to be evicted whenever
the pool needs it. A sequence that holds a page holds all pages before it in the tree, because a match takes the whole
way and a sequence that finds its page already known under another number keeps its own private and registers no more
(`register` returns None). Hence whatever lies below a page that nobody holds is held by nobody either: every page that
only the cache holds can be evicted, leaves first.

A restore that is in flight makes its pages known before they are filled, so that those who come back with it take
them instead of copies of their own (R11). Only such restores see them (`with_filling`), and wait for that copy. When
it fails, `forget` drops the pages and all that follow them, as if they had never been known.

A prompt may fill thousands of small pages in one step, so a page costs one node, its key and an entry in each of two
tables. A node names the page of its parent and the number of its children, and refers to none of them. So the collector
of garbage need not walk the nodes, which took longer than all the rest, and giving up a long chain is not recursive.

Eviction takes the least recently used leaf. Leaves wait in a heap by time of last use; a node enters when it is a leaf
that nobody holds, and entries that no longer describe it are dropped when they surface: O(log n) amortised. Who uses a
page uses all before it, and the time is noted for the last one only: when that one has had its turn, so have those
before it that nobody has let go of since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heappushpop
from itertools import islice
from typing import cast

import msgspec

from pyserve.pool import Pool

Key = tuple[int, tuple[int, ...]]  # the page before, and the tokens in this one


class Node(msgspec.Struct, eq=False, gc=False):
    """One cached page in the tree; compared by identity."""

    key: Key
    page: int
    depth: int  # pages from the start, this one included
    last_use: int = 0
    is_filling: bool = False  # a restore's copy is still writing the page
    num_children: int = 0

    @property
    def parent_page(self) -> int:
        return self.key[0]


class PrefixCache:
    """The tree over the pages of `pool`, `page_size` tokens each."""

    def __init__(self, pool: Pool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        no_page = pool.num_pages  # not the number of one
        self.root = Node((no_page, ()), no_page, 0)
        self._known: dict[Key, Node] = {}  # by key
        self._nodes: list[Node | None] = [*[None] * pool.num_pages, self.root]  # the same by page, and the root
        self._filling: dict[int, Node] = {}  # those of them that are being filled; parents come before their children
        self._leaves: list[tuple[int, int]] = []  # (last use, page), the heap of what can be evicted
        self._now = 0  # counts uses

    def __len__(self) -> int:
        return len(self._known)

    def match(self, tokens: Sequence[int], max_pages: int, *, with_filling: bool = False) -> list[Node]:
        """The longest known chain of full pages that `tokens` start with, at most `max_pages` of them. `with_filling`:
        pages that a restore is still filling as well.
        """
        known, page = self._known, self.root.page
        chain: list[Node] = []
        for part in self._parts(islice(tokens, max_pages * self._page_size)):
            node = known.get((page, part))
            if node is None or (node.is_filling and not with_filling):
                break
            chain.append(node)
            page = node.page
        return chain

    def known(self, pages: Sequence[int]) -> list[Node]:
        """The nodes of a sequence's leading pages, as far as they are known."""
        node_of = self._nodes.__getitem__
        num_known = bisect_left(pages, True, key=lambda page: node_of(page) is None)  # what follows is unknown as well
        return cast("list[Node]", list(map(node_of, pages[:num_known])))

    def num_common(self, pages: Sequence[int]) -> int:
        """How many of a sequence's leading pages others hold, or copy out, as well. All of these are known."""
        holders, readers = self._pool.holders, self._pool.readers
        return next((number for number, page in enumerate(pages) if holders[page] + readers[page] < 2), len(pages))

    def num_shared(
        self,
        tokens: Sequence[int],
        max_pages: int,
        vacated: Container[int],
        taken: Container[int] = (),
        *,
        with_filling: bool = False,
    ) -> int:
        """How many pages of that chain some sequence goes on holding, so that sharing them costs no room.

        `vacated`: pages whose only holder is about to go. `taken`: pages that get a holder, whatever they have now.
        Stops at the first page that does not count: O(1) where nothing is shared.
        """
        page, num_shared = self.root.page, 0
        for part in self._parts(islice(tokens, max_pages * self._page_size)):
            node = self._known.get((page, part))
            if node is None or (node.is_filling and not with_filling):
                break
            page = node.page
            if (not self._pool.holders[page] or page in vacated) and page not in taken:
                break
            num_shared += 1
        return num_shared

    def end_of_shared(self, tokens: Sequence[int], max_pages: int) -> int:
        """The last page of the chain that `tokens` start with and some sequence holds; without any the root's."""
        known, holders, page = self._known, self._pool.holders, self.root.page
        for part in self._parts(islice(tokens, max_pages * self._page_size)):
            node = known.get((page, part))
            if node is None or node.is_filling or not holders[node.page]:
                break
            page = node.page
        return page

    def take(self, chain: list[Node]) -> list[int]:
        """A sequence holds the pages of `chain` from now on. Returns the pages."""
        pages = [node.page for node in chain]
        self._pool.retain(pages)
        return pages

    def register(
        self,
        node: Node,
        tokens: Sequence[int],
        pages: Sequence[int],
        num_full: int,
        *,
        is_filling: bool = False,
    ) -> Node | None:
        """A sequence, whose pages are known up to `node`, has filled the first `num_full` of its `pages` with its
        `tokens`, or is about to. Returns the node of the last of these. None: some page is known already under another
        number; the sequence keeps its own private, and all behind it.
        """
        size, known, nodes, now = self._page_size, self._known, self._nodes, self._now
        first = last = node.depth
        told = tokens[first * size : num_full * size]
        for part in self._parts(told) if num_full > first + 1 else [tuple(told)] * (num_full - first):
            page, key = pages[last], (node.page, part)
            new = Node(key, page, last + 1, now + 1, is_filling)
            if known.setdefault(key, new) is not new:
                break
            now += 1
            last += 1
            node.num_children += 1
            nodes[page] = node = new
            if is_filling:
                self._filling[page] = new
        self._now = now
        self._pool.cache(pages[first:last])
        return node if last >= num_full else None

    def _parts(self, tokens: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """The tokens of one full page after the other."""
        return zip(*[iter(tokens)] * self._page_size, strict=False)  # so many from the one iterator each time

    def filled(self, pages: Iterable[int]) -> None:
        """The restore that filled `pages` has landed; the first of them are those that were made known."""
        for page in pages:
            node = self._filling.pop(page, None)
            if node is None:
                return
            node.is_filling = False

    def filling_pages(self) -> set[int]:
        return set(self._filling)

    def forget(self, page: int) -> None:
        """`page` was not filled: neither it nor what follows it is known any more. Harmless when it is not known.

        What follows a page that is being filled is being filled as well.
        """
        top = self._filling.get(page)
        if top is None:
            return
        forgotten = {page: top}
        for node in self._filling.values():
            if node.parent_page in forgotten:
                forgotten[node.page] = node
        for node in forgotten.values():
            self._parent(node).num_children -= 1
        for page, node in forgotten.items():
            del self._known[node.key], self._filling[page]
            self._nodes[page] = None
        self._pool.uncache(forgotten)
        parent = self._parent(top)
        if parent is not self.root and not parent.num_children and self._is_unheld(parent.page):
            self._offer(parent)

    def _parent(self, node: Node) -> Node:
        parent = self._nodes[node.parent_page]
        assert parent is not None, f"page {node.page} is known, the page before it is not"
        return parent

    def last_of(self, pages: Sequence[int]) -> Node:
        """The node of the last of a sequence's leading `pages`, all of which are known; without any the root."""
        last = self._nodes[pages[-1]] if pages else self.root
        assert last is not None, f"page {pages[-1]} is not known"
        return last

    def let_go(self, pages: Sequence[int]) -> None:
        """Nobody holds these cached pages of one sequence any more, which are in its order."""
        if not pages:
            return
        self._now += 1
        node = self._nodes[pages[-1]]
        assert node is not None, f"page {pages[-1]} is not known"
        node.last_use = self._now  # the others, which are before it, go when it has gone
        if not node.num_children:
            self._offer(node)

    def evict(self, count: int = 1) -> list[int]:
        """Frees the `count` least recently used pages that nobody holds. There must be so many. Returns the pages."""
        known, nodes, leaves, root = self._known, self._nodes, self._leaves, self.root
        holders, readers = self._pool.holders, self._pool.readers
        pages: list[int] = []
        entry = heappop(leaves)
        while True:
            last_use, page = entry
            node = nodes[page]
            if node is None or node.last_use != last_use or node.num_children or holders[page] or readers[page]:
                entry = heappop(leaves)  # it has changed since it was offered
                continue
            key = node.key
            parent = nodes[key[0]]
            assert parent is not None, f"the page before {page} is not known"
            del known[key]
            nodes[page] = None
            parent.num_children -= 1
            pages.append(page)
            is_last = len(pages) == count
            page = parent.page
            if parent is not root and not parent.num_children and not holders[page] and not readers[page]:
                if is_last:
                    self._offer(parent)
                else:
                    entry = heappushpop(leaves, (parent.last_use, page))
            elif not is_last:
                entry = heappop(leaves)
            if is_last:
                break
        self._pool.evict(pages)
        return pages

    def drop(self, pages: Sequence[int]) -> None:
        """A sequence has let go of all its `pages`, which are in its order and no good: those that nobody else holds,
        and that nothing follows which stays, are known no more and come free.
        """
        dropped = []
        for page in reversed(pages):
            node = self._nodes[page]
            if node is None:
                continue
            if node.num_children or not self._is_unheld(page):
                break
            self._parent(node).num_children -= 1
            del self._known[node.key]
            self._nodes[page] = None
            dropped.append(page)
        self._pool.evict(dropped)

    def _is_unheld(self, page: int) -> bool:
        return not self._pool.holders[page] and not self._pool.readers[page]

    def _offer(self, node: Node) -> None:
        heappush(self._leaves, (node.last_use, node.page))
        if len(self._leaves) > 2 * len(self._known) + 64:
            self._leaves = [
                (each.last_use, each.page)
                for each in self._known.values()
                if not each.num_children and self._is_unheld(each.page)
            ]
            heapify(self._leaves)

    def check_integrity(self) -> None:
        """Raises AssertionError naming the first thing that does not add up."""
        offered = set(self._leaves)
        assert sum(map(bool, self._nodes)) == len(self._known) + 1, "a page is known that is not found"
        num_children = Counter(node.parent_page for node in self._known.values())
        assert self.root.num_children == num_children[self.root.page], "a prompt's first page is lost"
        for key, node in self._known.items():
            page = node.page
            assert self._nodes[page] is node and self._pool.is_cached[page], f"page {page} is not the cache's"
            assert node.key == key, f"page {page} is cut off"
            assert node.num_children == num_children[page], f"page {page} miscounts the pages that follow it"
            assert node.is_filling == (page in self._filling), f"page {page} is lost to those that are being filled"
            parent = self._parent(node)
            assert parent.depth == node.depth - 1, f"page {page} is cut off"
            assert not parent.is_filling or node.is_filling, f"page {page} follows one that is not filled"
            if parent is not self.root:
                assert self._known.get(parent.key) is parent, f"the page before {page} is not cached"
                is_deeper_held = self._pool.holders[page] > self._pool.holders[parent.page]
                assert not is_deeper_held, f"page {page} has more holders than the page before it"
            if not node.num_children and self._is_unheld(page):
                assert (node.last_use, page) in offered, f"page {page} can never be evicted"
        assert sum(self._pool.is_cached) == len(self._known), "the pool has cached pages that the cache does not know"


def num_common_pages(
    first: Sequence[int], second: Sequence[int], page_size: int, max_pages: int, beyond: int = 0
) -> int:
    """How many pages of `page_size` tokens both begin with, at most `max_pages`; `beyond` if they are no more than
    that, which takes a look at one page.
    """

    def is_same(start: int, stop: int) -> bool:
        part = slice(start * page_size, stop * page_size)
        return first[part] == second[part]

    low, high = beyond + 1, max_pages
    if low > high or not is_same(beyond, low) or not is_same(0, beyond):
        return beyond
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_same(low, middle) else (low, middle - 1)
    return low
