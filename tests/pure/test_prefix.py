"""The prompt cache: what it matches, and in which order it gives pages up."""

from __future__ import annotations

from pyserve.pool import Pool
from pyserve.prefix import Node, PrefixCache


def fill(cache: PrefixCache, pool: Pool, tokens: list[int], size: int = 4) -> list[int]:
    """A sequence that computed `tokens`, registered its full pages and is still there. Returns its pages."""
    chain = cache.match(tokens, len(tokens) // size)
    pages = cache.take(chain)
    node: Node | None = chain[-1] if chain else cache.root
    pages += pool.allocate(len(tokens) // size - len(chain))
    for index in range(len(chain), len(pages)):
        assert node is not None
        node = cache.register(node, tuple(tokens[index * size : (index + 1) * size]), pages[index])
    cache.check_integrity()
    return pages


def leave(cache: PrefixCache, pool: Pool, pages: list[int]) -> None:
    cache.let_go(pool.release(pages))
    cache.check_integrity()
    pool.check_integrity()


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_match_is_full_pages_of_the_very_same_tokens() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    pages = fill(cache, pool, numbers(0, 12))
    assert [node.page for node in cache.match(numbers(0, 20), 5)] == pages
    assert [node.page for node in cache.match(numbers(0, 20), 2)] == pages[:2]
    assert [node.page for node in cache.match([0, 1, 2, 3, 4, 9, 6, 7], 2)] == pages[:1]
    assert cache.match(numbers(4, 8), 2) == [], "the same tokens after others are other pages"


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_stand_on() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    old = fill(cache, pool, numbers(0, 12))
    new = fill(cache, pool, numbers(100, 8))
    leave(cache, pool, old)
    leave(cache, pool, new)
    assert [*cache.evict(), *cache.evict(3), *cache.evict()] == [old[2], old[1], old[0], new[1], new[0]]
    assert pool.num_free == 16


def test_use_makes_recent() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    first, second = fill(cache, pool, numbers(0, 4)), fill(cache, pool, numbers(100, 4))
    leave(cache, pool, first)
    leave(cache, pool, second)
    leave(cache, pool, cache.take(cache.match(numbers(0, 4), 1)))
    assert cache.evict(2) == [*second, *first]


def test_what_somebody_holds_stays() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    pages = fill(cache, pool, numbers(0, 12))
    short = cache.take(cache.match(numbers(0, 8), 2))
    leave(cache, pool, pages)
    assert pool.num_cached == 1
    assert cache.evict() == pages[2:3]
    leave(cache, pool, short)
    assert cache.evict(2) == [pages[1], pages[0]]


def test_the_second_to_compute_a_page_keeps_its_own() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    fill(cache, pool, numbers(0, 4))
    (private,) = pool.allocate(1)
    assert cache.register(cache.root, (0, 1, 2, 3), private) is None
    leave(cache, pool, [private])
    assert pool.num_free == 15, "not cached, so freed at once"


def test_shared_pages_are_counted_until_the_first_that_nobody_holds() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    pages = fill(cache, pool, numbers(0, 12))
    assert cache.num_shared(numbers(0, 12), 3, ()) == 3
    assert cache.num_shared(numbers(0, 12), 3, {pages[1]}) == 1
    short = cache.take(cache.match(numbers(0, 12), 1))
    leave(cache, pool, pages)
    assert cache.num_shared(numbers(0, 12), 3, ()) == 1
    leave(cache, pool, short)
    assert cache.num_shared(numbers(0, 12), 3, ()) == 0
