"""Host memory for parked state: budgets, growth beside the loop, what is given back and when (R17, R22)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.host_arena import Extent, HostArena, SlabMaker, allocate_slab

PAGE = 1 << 16  # bytes, so that the smallest slab has 16 pages
PLENTY = 1 << 40


def arena_of(
    budget_pages: int, *, allocate: Callable[[int], torch.Tensor] = allocate_slab, **options: float
) -> HostArena:
    return HostArena(PAGE, budget_pages * PAGE, allocate=allocate, free_memory=lambda: PLENTY, **options)


def grown(arena: HostArena, num_pages: int, now_s: float = 0.0) -> HostArena:
    assert arena.grow(num_pages, now_s)
    while arena.is_growing:
        arena.wait(5)
        assert arena.poll(now_s)
    return arena


def pages_of(extents: list[Extent]) -> list[tuple[int, int]]:
    return [(id(each.slab), page) for each in extents for page in range(each.first, each.first + each.count)]


def test_slabs_are_made_in_another_thread_and_counted_from_the_moment_they_are_asked_for() -> None:
    makers: list[threading.Thread] = []
    gate = threading.Event()

    def slow(num_bytes: int) -> torch.Tensor:
        makers.append(threading.current_thread())
        gate.wait(5)
        return allocate_slab(num_bytes)

    arena = arena_of(100, allocate=slow)
    started_s = time.monotonic()
    assert arena.grow(10, 0.0)
    assert time.monotonic() - started_s < 0.1, "asking does not wait"
    assert arena.held_bytes == 16 * PAGE and arena.idle_pages == 0
    assert arena.free_pages(0.0) == 100
    assert arena.take(1) is None, "not there yet"
    gate.set()
    grown(arena, 10)
    assert arena.idle_pages == 16 and makers[0] is not threading.main_thread()
    arena.close()
    assert arena.held_bytes == 0


def test_the_budget_is_checked_before_anything_is_allocated() -> None:
    sizes: list[int] = []

    def counting(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return allocate_slab(num_bytes)

    arena = arena_of(20, allocate=counting)
    assert not arena.grow(21, 0.0), "one that is too large is refused, not kept"
    assert arena.held_bytes == 0 and not sizes
    grown(arena, 20)
    assert sum(sizes) == arena.held_bytes == 20 * PAGE
    assert arena.take(20) is not None
    assert not arena.grow(1, 0.0)
    assert arena.free_pages(0.0) == 0
    arena.close()


def test_what_the_machine_has_free_counts_too() -> None:
    free_bytes = (256 << 20) + 18 * PAGE  # 256 MiB stay for others
    arena = HostArena(PAGE, 1000 * PAGE, free_memory=lambda: free_bytes)
    assert arena.free_pages(0.0) == 18
    assert not arena.grow(19, 0.0)
    grown(arena, 17)
    assert arena.held_bytes <= 18 * PAGE
    arena.close()


def test_when_the_machine_runs_short_idle_memory_goes_back_at_once() -> None:
    free_bytes = [PLENTY]
    arena = HostArena(PAGE, 1000 * PAGE, free_memory=lambda: free_bytes[0])
    grown(arena, 64)
    free_bytes[0] = 100 << 20
    arena.trim(2.0, keep_pages=64)
    assert arena.held_bytes == 0
    arena.close()


def test_idle_slabs_go_back_largest_first_and_never_one_in_use() -> None:
    arena = arena_of(1000, idle_s=10)
    used = grown(arena, 16).take(16)
    assert used is not None
    for num_pages in (16, 64, 32):
        grown(arena, arena.idle_pages + num_pages)
    assert arena.idle_pages == 112
    arena.trim(9.0)
    assert arena.idle_pages == 112, "not idle for long enough"
    arena.trim(11.0, keep_pages=40)
    assert arena.idle_pages == 48, "the largest went, and enough stayed"
    arena.trim(11.0)
    assert arena.idle_pages == 0 and arena.held_bytes == 16 * PAGE
    assert used[0].slab.data.numel() == 16 * PAGE
    arena.give_back(used, 12.0)
    arena.trim(21.0)
    assert arena.held_bytes == 16 * PAGE, "idle since it was given back"
    arena.trim(21.0, at_once=True)
    assert arena.held_bytes == 0
    arena.close()


def test_memory_that_cannot_be_had_is_told_once_and_not_asked_for_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(num_bytes: int) -> torch.Tensor:
        raise MemoryError(f"{num_bytes} bytes: locked memory is limited")

    arena = arena_of(100, allocate=failing)
    assert arena.grow(5, 0.0)
    arena.wait(5)
    assert not arena.poll(0.0)
    assert arena.held_bytes == 0
    assert not arena.grow(5, 1.0) and arena.free_pages(1.0) == 0
    assert [record.message.count("locked memory is limited") for record in caplog.records] == [1]
    arena.allocate = allocate_slab
    grown(arena, 5, 11.0)
    arena.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_page_is_given_twice_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    arena = arena_of(100)
    held: list[list[Extent]] = []
    for is_take, number in steps:
        if is_take or not held:
            if arena.grow(number, 0.0):
                extents = grown(arena, number).take(number)
                assert extents is not None
                held.append(extents)
        else:
            arena.give_back(held.pop(number % len(held)), 0.0)
        used = [page for extents in held for page in pages_of(extents)]
        assert len(used) == len(set(used)), "a page is given twice"
        assert arena.idle_pages + len(used) == arena.held_bytes // PAGE, "a page is lost"
        assert arena.held_bytes <= 100 * PAGE
    for extents in held:
        arena.give_back(extents, 0.0)
    arena.trim(0.0, at_once=True)
    assert arena.held_bytes == 0
    arena.close()


class NoPins:
    """A device that asks for pinned memory and cannot have any."""

    pins_memory = True

    def pinned(self, slab: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the limit of locked memory is reached\nmore that nobody reads")


def test_memory_that_cannot_be_pinned_is_taken_all_the_same_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    make_slab = SlabMaker(NoPins())  # type: ignore[arg-type]
    arena = arena_of(1000, allocate=make_slab)
    for count in (100, 200):
        assert arena.grow(count, 0.0)
        while arena.is_growing:
            arena.poll(0.0)
    assert arena.take(200) is not None
    assert not make_slab.can_pin(1 << 20)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the limit of locked memory is reached; parks and restores are slower" in line and "\n" not in line
    arena.close()
