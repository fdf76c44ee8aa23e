"""Where pages come from, who holds them, and that none is lost."""

from __future__ import annotations

import random

import pytest

from pyserve.page_runs import runs
from pyserve.pool import PageSet, Pool


def test_a_sequence_grows_into_the_next_page() -> None:
    pool = Pool(64)
    first = pool.allocate(4)
    assert first == [0, 1, 2, 3]
    assert pool.allocate(1, after=3) == [4]


def test_a_new_sequence_starts_in_the_middle_of_the_largest_gap() -> None:
    pool = Pool(64)
    pool.allocate(4)
    assert pool.allocate(4) == [32, 33, 34, 35]


def test_pages_left_over_are_all_used() -> None:
    pool = Pool(10)
    taken = [pool.allocate(1)[0] for _ in range(10)]
    assert sorted(taken) == list(range(10))
    pool.check_integrity()


def test_four_sequences_growing_side_by_side_leave_few_runs() -> None:
    """Taking the lowest free page would leave one run per page: 150 each."""
    pool = Pool(1024)
    chats = [pool.allocate(20) for _ in range(4)]
    for _ in range(150):
        for pages in chats:
            pages += pool.allocate(1, after=pages[-1])
    assert max(len(runs(pages)) for pages in chats) <= 2
    pool.check_integrity()


def test_what_is_free_of_a_block_is_left_to_the_sequence_that_began_it() -> None:
    """As long as a whole block is free; then others take half of it, and all of it before anything is refused."""
    pool = Pool(32, block_len=8)
    first, second = pool.allocate(3), pool.allocate(11)
    assert all(page % 8 == 0 for page in (first[0], second[0]))
    third = pool.allocate(8)
    assert first[0] // 8 not in {page // 8 for page in second + third}
    assert pool.num_lacking(5, second[-1]) == 0 and pool.num_lacking(6, second[-1]) == 8
    assert pool.num_lacking(1, third[-1]) == 8 and pool.num_lacking(9, None) == 16
    first += pool.allocate(1, after=first[-1])
    assert first == list(range(first[0], first[0] + 4))
    fourth = pool.allocate(4)
    assert fourth[0] % 4 == 0 and fourth == list(range(fourth[0], fourth[0] + 4)), "half a block"
    rest = pool.allocate(pool.num_free)
    assert sorted(first + second + third + fourth + rest) == list(range(32))
    pool.check_integrity()


@pytest.mark.parametrize("block_len", [1, 2, 8])
def test_whatever_is_free_is_given_in_blocks_or_in_pieces(block_len: int) -> None:
    dice = random.Random(block_len)
    pool = Pool(100, block_len)
    chats: list[list[int]] = [[]]
    for _ in range(3000):
        pages = dice.choice(chats)
        count = min(dice.choice([1, 1, 1, 5, 40]), pool.num_free)
        pages += pool.allocate(count, after=pages[-1] if pages else None)
        if not pool.num_free or dice.random() < 0.05:
            pool.release(chats.pop(dice.randrange(len(chats))))
        if len(chats) < 4:
            chats.append([])
        held = [page for each in chats for page in each]
        assert len(set(held)) == len(held) == pool.num_held
    pool.check_integrity()


def test_freed_neighbours_become_one_gap() -> None:
    pool = Pool(12)
    pages = pool.allocate(12)
    for page in (3, 5, 4, 9, 0, 1, 2):
        pool.release([page])
        pool.check_integrity()
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]
    assert pool.num_free == 1 and pages[9] == 9


def test_a_page_in_a_copy_is_nobodys_until_it_landed() -> None:
    pool = Pool(4)
    pages = pool.allocate(4)
    pool.start_reading(pages)
    assert (pool.num_leaving, pool.num_available) == (4, 0)
    with pytest.raises(AssertionError, match="1 pages asked for, 0 free"):
        pool.allocate(1)
    pool.stop_reading(pages)
    assert pool.num_free == 4


def test_a_shared_page_goes_with_the_last_one_that_leaves() -> None:
    pool = Pool(4)
    (page,) = pool.allocate(1)
    pool.cache([page])
    pool.retain([page])
    pool.start_reading([page])
    assert (pool.num_held, pool.num_leaving) == (1, 0)
    pool.start_reading([page])
    assert (pool.num_held, pool.num_leaving) == (0, 1)
    pool.stop_reading([page])
    assert pool.num_leaving == 1
    assert pool.stop_reading([page]) == [page]
    assert pool.num_cached == 1
    pool.evict([page])
    assert pool.num_free == 4
    pool.check_integrity()


def test_only_pages_of_ones_own_count() -> None:
    pool = Pool(16)
    shared = pool.allocate(5)
    pool.cache(shared)
    pool.retain(shared)
    own = pool.allocate(3)
    assert pool.num_own(shared + own) == 3
    assert pool.num_own(own) == 3
    assert pool.num_own(shared) == 0


def test_a_large_pool_forgets_nothing_over_many_changes() -> None:
    """131,072 pages: no operation may look at all of them."""
    dice = random.Random(1)
    pool = Pool(131_072)
    chats = [pool.allocate(dice.randint(1, 300)) for _ in range(256)]
    for _ in range(200):
        index = dice.randrange(256)
        pool.release(chats[index])
        chats[index] = pool.allocate(dice.randint(1, 300))
        for pages in chats:
            pages += pool.allocate(1, after=pages[-1])
    assert pool.num_held == sum(len(pages) for pages in chats)
    assert len({page for pages in chats for page in pages}) == pool.num_held
    pool.check_integrity()


@pytest.mark.parametrize("block_len", [1, 2, 8])
def test_a_page_grown_is_the_one_that_would_be_allocated(block_len: int) -> None:
    """Whatever is freed in between, and however little is left."""
    dice = random.Random(block_len)
    asked, grown = Pool(150, block_len), Pool(150, block_len)
    chats: list[list[int]] = []
    num_grown = 0
    for _ in range(4000):
        if len(chats) < 5:
            chats.append(asked.allocate(1))
            assert grown.allocate(1) == chats[-1]
        pages = dice.choice(chats)
        assert asked.num_free == grown.num_free
        num_lacking = grown.num_lacking(1, pages[-1])
        (page,) = asked.allocate(1, pages[-1])
        next_page = grown.grow(pages[-1])
        num_grown += next_page is not None
        assert next_page is None or not num_lacking, "nothing has to be evicted for it"
        assert page == next_page or (next_page is None and grown.allocate(1, pages[-1]) == [page])
        pages.append(page)
        while asked.num_free < 5 or dice.random() < 0.02:
            pages = chats.pop(dice.randrange(len(chats)))
            dice.shuffle(pages)
            asked.release(pages)
            grown.release(pages)
    grown.check_integrity()
    assert num_grown > 1000


def test_pages_freed_at_once_are_given_again_as_if_freed_one_by_one() -> None:
    dice = random.Random(1)
    at_once, one_by_one = Pool(200, 4), Pool(200, 4)
    for _ in range(200):
        count = dice.randint(1, 60)
        pages = at_once.allocate(count)
        assert one_by_one.allocate(count) == pages
        left = dice.sample(pages, dice.randint(0, min(2, count)))
        gone = [page for page in pages if page not in left]
        dice.shuffle(gone)
        at_once.release(gone)
        for page in gone:
            one_by_one.release([page])
        if at_once.num_free < 60:
            at_once.release([page for page in range(200) if at_once.holders[page]])
            one_by_one.release([page for page in range(200) if one_by_one.holders[page]])
    at_once.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_many_pages_at_once_become_what_they_would_one_by_one(seed: int) -> None:
    """Held, read, cached and shared, in long stretches and short ones, upwards or not, up to the last page."""
    dice = random.Random(seed)
    pool, one_by_one = Pool(700, 4), Pool(700, 4)
    held: list[list[int]] = []
    read: list[list[int]] = []

    def change(name: str, pages: list[int]) -> list[int]:
        """Returns what both say that only the cache holds from now on."""
        let_go: list[int] = getattr(pool, name)(pages) or []
        assert let_go == [each for page in pages for each in getattr(one_by_one, name)([page]) or []]
        return let_go

    cached: set[int] = set()
    for _ in range(400):
        count = dice.choice([1, 3, 15, 63, 64, 65, 130, 300])
        if count <= pool.num_free and len(held) < 8:
            pages = pool.allocate(count)
            assert one_by_one.allocate(count) == pages
            held.append(pages if dice.random() < 0.8 else pages[::-1])
            known = held[-1][: dice.choice([0, 0, count // 2, count])]
            change("cache", known)
            if known and dice.random() < 0.5:
                shared = known[: dice.randint(1, len(known))]
                change("retain", shared)
                held.append(shared)
        elif held and dice.random() < 0.7:
            pages = held.pop(dice.randrange(len(held)))
            if dice.random() < 0.5:
                cached.update(change("release", pages))
            else:
                change("start_reading", pages)
                read.append(pages)
        elif read:
            cached.update(change("stop_reading", read.pop(dice.randrange(len(read)))))
        elif cached:
            change("evict", sorted(cached))
            cached.clear()
        for each in (pool, one_by_one):
            each.check_integrity()
        assert (pool.holders, pool.readers, pool.is_cached) == (
            one_by_one.holders,
            one_by_one.readers,
            one_by_one.is_cached,
        )
    assert pool.num_free == one_by_one.num_free


def test_a_set_of_pages_has_what_was_added_to_it_and_to_the_one_that_it_is_made_of() -> None:
    pages = PageSet()
    pages.add([3, 4])
    more = PageSet(pages)
    more.add([7])
    assert 4 in more and 7 in more and 8 not in more
    assert 4 in pages and 7 not in pages
    pages.add([8])
    assert 8 in pages and 8 not in more and 8 in PageSet(pages)
