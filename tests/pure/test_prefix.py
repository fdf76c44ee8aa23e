"""The prompt cache: what it matches, and in which order it gives pages up."""

from __future__ import annotations

import random

import pytest

from pyserve.pool import Pool
from pyserve.prefix import PrefixCache


def fill(cache: PrefixCache, pool: Pool, tokens: list[int], size: int = 4) -> list[int]:
    """A sequence that computed `tokens`, registered its full pages and is still there. Returns its pages."""
    chain = cache.match(tokens, len(tokens) // size)
    pages = cache.take(chain)
    pages += pool.allocate(len(tokens) // size - len(chain))
    last = cache.register(chain[-1] if chain else cache.root, tokens, pages, len(pages))
    assert last is not None and last.page == pages[-1]
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


def test_what_is_no_good_is_dropped_but_for_what_others_hold_or_follow() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    bad = fill(cache, pool, numbers(0, 16))
    other_tokens = [*numbers(0, 8), *numbers(50, 4)]
    other = fill(cache, pool, other_tokens)
    assert other[:2] == bad[:2]
    private = pool.allocate(1)  # the last page of the bad one is not full
    leave(cache, pool, bad)
    pool.release(private)
    cache.drop([*bad, *private])
    cache.check_integrity()
    pool.check_integrity()
    assert [node.page for node in cache.match(numbers(0, 16), 4)] == bad[:2]
    leave(cache, pool, other)
    cache.drop(bad)
    assert [node.page for node in cache.match(other_tokens, 3)] == other
    cache.drop(other)
    cache.check_integrity()
    assert cache.match(other_tokens, 3) == [] and pool.num_free == 16


def test_use_makes_recent() -> None:
    pool = Pool(16)
    cache = PrefixCache(pool, 4)
    first, second = fill(cache, pool, numbers(0, 4)), fill(cache, pool, numbers(100, 4))
    leave(cache, pool, first)
    leave(cache, pool, second)
    leave(cache, pool, cache.take(cache.match(numbers(0, 4), 1)))
    assert cache.evict(2) == [*second, *first]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_shared_the_leaf_goes_that_was_used_last_the_longest_ago(seed: int) -> None:
    """Beside a cache that notes for every page when somebody let go of it last."""
    dice = random.Random(seed)
    pool = Pool(60)
    cache = PrefixCache(pool, 1)
    running: list[list[int]] = []
    parents: dict[int, int] = {}  # of all that are cached, by page; the first have themselves
    let_go_at: dict[int, int] = {}
    for now in range(600):
        if len(running) < 5 and pool.num_free >= 9:
            pages = fill(cache, pool, dice.choices(range(2), k=dice.randint(1, 9)), size=1)
            parents.update(zip(pages, pages[:1] + pages, strict=False))
            running.append(pages)
        elif running and dice.random() < 0.6:
            pages = running.pop(dice.randrange(len(running)))
            let_go_at.update(dict.fromkeys(pages, now))
            leave(cache, pool, pages)
        elif pool.num_cached:
            count = dice.randint(1, min(pool.num_cached, 12))
            expected = []
            for _ in range(count):
                inner = {parent for page, parent in parents.items() if page != parent}
                held = {page for pages in running for page in pages}
                expected.append(min(parents.keys() - inner - held, key=lambda page: (let_go_at[page], page)))
                del parents[expected[-1]]
            assert cache.evict(count) == expected
    cache.check_integrity()


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
    assert cache.register(cache.root, [0, 1, 2, 3], [private], 1) is None
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


def test_a_sequence_goes_on_where_its_pages_are_known_up_to() -> None:
    """Page by page or many at once, it is the same tree."""
    pool = Pool(32)
    cache = PrefixCache(pool, 2)
    pages, tokens = pool.allocate(10), numbers(0, 20)
    node = cache.register(cache.root, tokens, pages, 3)
    assert node is not None and (node.page, node.depth) == (pages[2], 3)
    assert cache.register(node, tokens, pages, 3) is node, "nothing is full that was not"
    node = cache.register(node, tokens, pages, 10)
    assert node is not None and (node.page, node.depth, len(cache)) == (pages[9], 10, 10)
    assert [each.page for each in cache.match(tokens, 10)] == pages
    cache.check_integrity()


def test_whoever_meets_a_page_that_is_known_keeps_all_behind_it() -> None:
    pool = Pool(32)
    cache = PrefixCache(pool, 2)
    fill(cache, pool, numbers(0, 6), size=2)
    own = pool.allocate(5)
    assert cache.register(cache.root, [90, 91, *numbers(0, 8)], own, 5) is not None
    private = pool.allocate(5)
    assert cache.register(cache.root, numbers(0, 10), private, 5) is None
    assert len(cache) == 8 and not any(pool.is_cached[page] for page in private)
    cache.check_integrity()


def test_what_was_not_filled_is_forgotten_with_all_that_follows_it() -> None:
    pool = Pool(32)
    cache = PrefixCache(pool, 2)
    shared = fill(cache, pool, numbers(0, 4), size=2)
    filling = pool.allocate(3)
    node = cache.register(cache.last_of(shared), numbers(0, 10), shared + filling, 5, is_filling=True)
    assert node is not None
    branch = pool.allocate(2)
    tokens = [*numbers(0, 6), 50, 51, 52, 53]
    cache.register(cache.last_of([*shared, filling[0]]), tokens, [*shared, filling[0], *branch], 5, is_filling=True)
    assert cache.filling_pages() == {*filling, *branch}
    assert [each.page for each in cache.match(numbers(0, 10), 5)] == shared, "nobody else waits for a copy"
    cache.check_integrity()
    cache.forget(filling[1])
    assert cache.filling_pages() == {filling[0], *branch}
    cache.forget(filling[0])
    cache.forget(filling[0])
    assert not cache.filling_pages() and len(cache) == 2 and not any(pool.is_cached[page] for page in filling + branch)
    cache.check_integrity()
    leave(cache, pool, shared)
    assert cache.evict(2) == shared[::-1], "the last of what stays can be evicted"


def test_what_was_filled_is_there_for_everybody() -> None:
    pool = Pool(32)
    cache = PrefixCache(pool, 2)
    pages = pool.allocate(3)
    cache.register(cache.root, numbers(0, 6), pages, 3, is_filling=True)
    cache.filled(pages)
    assert [each.page for each in cache.match(numbers(0, 6), 3)] == pages
    cache.forget(pages[0])
    assert len(cache) == 3, "it was filled, and stays"
    cache.check_integrity()
