"""THE PROMPT CACHE: which full pages hold which tokens after which tokens.

A tree: each node is one full page, its children are the pages that may follow, keyed by the tokens in them. Matching a
prompt walks down from the root. Keys are compared as tokens, so no two prompts are ever confused.

The cache knows pages, it does not keep them from anyone: a page that no sequence holds is there to be evicted whenever
the pool needs it. A sequence that holds a page holds all pages before it in the tree, because a match takes the whole
way and a sequence that finds its page already known under another number keeps its own private and registers no more
(`register` returns None). Hence whatever lies below a page that nobody holds is held by nobody either: every page that
only the cache holds can be evicted, leaves first.

A restore that is in flight makes its pages known before they are filled, so that those who come back with it take
them instead of copies of their own (R11). Only such restores see them (`with_filling`), and wait for that copy. When
it fails, `forget` drops the pages and all that follow them, as if they had never been known.

Eviction takes the least recently used leaf. Leaves wait in a heap by time of last use; a node enters when it is a leaf
that nobody holds, and entries that no longer describe it are dropped when they surface: O(log n) amortised.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from heapq import heapify, heappop, heappush, heappushpop

from pyserve.pool import Pool


class Node:
    """One cached page in the tree."""

    __slots__ = ("children", "depth", "is_filling", "key", "last_use", "page", "parent")

    def __init__(self, parent: Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0  # pages from the start, this one included
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}
        self.last_use = 0
        self.is_filling = False  # a restore's copy is still writing the page


class PrefixCache:
    """The tree over the pages of `pool`, `page_size` tokens each."""

    def __init__(self, pool: Pool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self.root = Node(None, (), 0)  # no page of its own
        self._nodes: dict[int, Node] = {}  # by page
        self._leaves: list[tuple[int, int]] = []  # (last use, page), the heap of what can be evicted
        self._now = 0  # counts uses

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], max_pages: int, *, with_filling: bool = False) -> list[Node]:
        """The longest known chain of full pages that `tokens` start with, at most `max_pages` of them. `with_filling`:
        pages that a restore is still filling as well.
        """
        size = self._page_size
        chain: list[Node] = []
        node = self.root
        for start in range(0, max_pages * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or (child.is_filling and not with_filling):
                break
            chain.append(child)
            node = child
        return chain

    def common(self, pages: Iterable[int]) -> tuple[list[Node], int]:
        """The nodes of a sequence's leading pages, as far as they are known, and how many of them others hold, or copy
        out, as well.
        """
        nodes = []
        for page in pages:
            node = self._nodes.get(page)
            if node is None:
                break
            nodes.append(node)
        users = (self._pool.holders[node.page] + self._pool.readers[node.page] for node in nodes)
        return nodes, next((number for number, count in enumerate(users) if count < 2), len(nodes))

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
        size = self._page_size
        node: Node | None = self.root
        for depth in range(max_pages):
            assert node is not None
            node = node.children.get(tuple(tokens[depth * size : (depth + 1) * size]))
            if node is None or (node.is_filling and not with_filling):
                return depth
            page = node.page
            if (not self._pool.holders[page] or page in vacated) and page not in taken:
                return depth
        return max_pages

    def take(self, chain: list[Node]) -> list[int]:
        """A sequence holds the pages of `chain` from now on. Returns the pages."""
        pages = [node.page for node in chain]
        self._pool.retain(pages)
        return pages

    def register(self, parent: Node, key: tuple[int, ...], page: int, *, is_filling: bool = False) -> Node | None:
        """The sequence that holds `parent` filled `page` with `key`, or is about to. None: another page is known for
        these tokens.
        """
        if key in parent.children:
            return None
        node = Node(parent, key, page)
        node.is_filling = is_filling
        parent.children[key] = node
        self._nodes[page] = node
        self._pool.cache(page)
        self._now += 1
        node.last_use = self._now
        return node

    def filled(self, pages: Iterable[int]) -> None:
        """The restore that filled `pages` has landed."""
        for page in pages:
            if node := self._nodes.get(page):
                node.is_filling = False

    def filling_pages(self) -> set[int]:
        return {page for page, node in self._nodes.items() if node.is_filling}

    def forget(self, page: int) -> None:
        """`page` was not filled: neither it nor what follows it is known any more. Harmless when it is not known."""
        top = self._nodes.get(page)
        if top is None:
            return
        assert top.parent is not None
        del top.parent.children[top.key]
        pages, nodes = [], [top]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            del self._nodes[node.page]
            pages.append(node.page)
        self._pool.uncache(pages)
        if top.parent is not self.root and not top.parent.children and self._is_unheld(top.parent.page):
            self._offer(top.parent)

    def last_of(self, pages: Sequence[int]) -> Node:
        """The node of the last of a sequence's leading `pages`, all of which are known; without any the root."""
        return self._nodes[pages[-1]] if pages else self.root

    def let_go(self, pages: Iterable[int]) -> None:
        """Nobody holds these cached pages any more."""
        self._now += 1
        for page in pages:
            node = self._nodes[page]
            node.last_use = self._now
            if not node.children:
                self._offer(node)

    def evict(self, count: int = 1) -> list[int]:
        """Frees the `count` least recently used pages that nobody holds. There must be so many. Returns the pages."""
        nodes, leaves, root = self._nodes, self._leaves, self.root
        holders, readers = self._pool.holders, self._pool.readers
        pages: list[int] = []
        entry = heappop(leaves)
        while True:
            last_use, page = entry
            node = nodes.get(page)
            if node is None or node.last_use != last_use or node.children or holders[page] or readers[page]:
                entry = heappop(leaves)  # it has changed since it was offered
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key], nodes[page]
            pages.append(page)
            is_last = len(pages) == count
            page = parent.page
            if parent is not root and not parent.children and not holders[page] and not readers[page]:
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

    def _is_unheld(self, page: int) -> bool:
        return not self._pool.holders[page] and not self._pool.readers[page]

    def _offer(self, node: Node) -> None:
        heappush(self._leaves, (node.last_use, node.page))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [
                (each.last_use, page)
                for page, each in self._nodes.items()
                if not each.children and self._is_unheld(page)
            ]
            heapify(self._leaves)

    def check_integrity(self) -> None:
        """Raises AssertionError naming the first thing that does not add up."""
        offered = set(self._leaves)
        for page, node in self._nodes.items():
            assert node.page == page and self._pool.is_cached[page], f"page {page} is not the cache's"
            assert node.parent is not None and node.parent.children.get(node.key) is node, f"page {page} is cut off"
            if node.parent is not self.root:
                assert self._nodes.get(node.parent.page) is node.parent, f"the page before {page} is not cached"
                is_deeper_held = self._pool.holders[page] > self._pool.holders[node.parent.page]
                assert not is_deeper_held, f"page {page} has more holders than the page before it"
            if not node.children and self._is_unheld(page):
                assert (node.last_use, page) in offered, f"page {page} can never be evicted"
        assert sum(self._pool.is_cached) == len(self._nodes), "the pool has cached pages that the cache does not know"


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
