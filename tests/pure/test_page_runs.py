"""Page lists as runs and combs: nothing lost, nothing reordered, nothing needlessly split (R16)."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from pyserve.page_runs import Comb, Run, combs, runs

pieces = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 6), st.sampled_from([1, -1, 2, 7])), max_size=12)


def stretches(specs: list[tuple[int, int, int]]) -> list[int]:
    """Page lists as pools leave them: stretches up, down and at strides."""
    return [10_000 + start + step * index for start, count, step in specs for index in range(count)]


page_lists = st.one_of(st.lists(st.integers(0, 40), max_size=60), pieces.map(stretches))


@given(page_lists)
def test_runs_give_the_list_back(pages: list[int]) -> None:
    result = runs(pages)
    assert [page for run in result for page in run.pages()] == pages
    for run in result:
        assert list(run.pages()) == pages[run.list_offset : run.list_offset + run.count]


@given(page_lists)
def test_combs_give_the_list_back(pages: list[int]) -> None:
    result = combs(runs(pages))
    assert [page for comb in result for page in comb.pages()] == pages
    for comb in result:
        length = comb.run_pages * comb.count
        assert list(comb.pages()) == pages[comb.list_offset : comb.list_offset + length]


@given(st.lists(st.integers(0, 6), max_size=9))
def test_no_split_has_fewer_runs(pages: list[int]) -> None:
    @cache
    def fewest(offset: int) -> int:
        if offset == len(pages):
            return 0
        ends = [
            end
            for end in range(offset + 1, len(pages) + 1)
            if any(
                pages[offset:end] == list(range(pages[offset], pages[offset] + step * (end - offset), step))
                for step in (1, -1)
            )
        ]
        return 1 + min(fewest(end) for end in ends)

    assert len(runs(pages)) == fewest(0)


def test_nothing_is_no_copy() -> None:
    assert runs([]) == []
    assert combs([]) == []


def test_one_stretch_is_one_copy_either_way() -> None:
    assert runs([4, 5, 6, 7]) == [Run(4, 4, 1, 0)]
    assert runs([7, 6, 5]) == [Run(7, 3, -1, 0)]
    assert combs(runs([7, 6, 5])) == [Comb(7, 1, -1, 3, 0)]


def test_four_sequences_side_by_side_leave_one_comb() -> None:
    pages = [page for tooth in range(10) for page in (8 * tooth, 8 * tooth + 1)]
    assert combs(runs(pages)) == [Comb(0, 2, 8, 10, 0)]
    assert combs(runs(pages[::-1])) == [Comb(8 * tooth + 1, 1, -1, 2, 18 - 2 * tooth) for tooth in range(9, -1, -1)]


def test_single_pages_at_a_stride_are_one_comb() -> None:
    assert combs(runs([0, 4, 8, 12])) == [Comb(0, 1, 4, 4, 0)]
    assert combs(runs([12, 8, 4, 0])) == [Comb(12, 1, -4, 4, 0)]


def test_a_different_length_ends_the_comb() -> None:
    assert combs(runs([0, 1, 4, 5, 8])) == [Comb(0, 2, 4, 2, 0), Comb(8, 1, 1, 1, 4)]
