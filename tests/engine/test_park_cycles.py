"""Parks and restores without an engine: the steady state, what is copied, hashes, budgets (R17, R22, R23a, R23b)."""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyserve.park import Ending, Parking
from pyserve.sequence import Tier
from tests.engine.parked import PAGE_SIZE, content, flip, park, restore, round_trip, sequence_of, small_store


class CountedHandle:
    """Counts the calls of a copy stream in the extension, and those of its copies' events."""

    def __init__(self, real: Any, calls: Counter[str]) -> None:
        self._real = real
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self._calls[name] += 1
            result = getattr(self._real, name)(*given)
            return CountedHandle(result, self._calls) if name == "copy_pages" else result

        return call


def test_a_thousand_cycles_pin_allocate_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the posts of a copy out and one back, and questions whether they are done."""
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20, verify="all")
    stream, calls = parking.tiers.stream, Counter[str]()
    stream._handle = CountedHandle(stream._handle, calls)
    sequences = [sequence_of(5 + 4 * number, id=number) for number in range(4)]  # 2, 3, 4 and 5 pages
    places = [list(range(8 * number, 8 * number + number + 2)) for number in range(4)]
    source = random.Random(1)
    parking.prepare(20)
    for sequence, pages in zip(sequences, places, strict=True):
        round_trip(parking, kv, sequence, pages, pages)
    before = parking.arena.num_allocations
    held = parking.held_bytes
    calls.clear()
    monkeypatch.setattr(mmap, "mmap", None)
    for number in range(1000):
        sequence, pages = sequences[number % 4], places[number % 4]
        back = source.sample(range(8 * sequence.id, 8 * sequence.id + 8), len(pages))
        kv.tensor[pages[-1]] += 1.0  # it goes on in its last page
        round_trip(parking, kv, sequence, pages, back)
        places[sequence.id] = back
        if number % 3 == 0:
            parking.discard([sequence])  # it ends, and another begins under this name
    assert parking.arena.num_allocations == before
    assert parking.held_bytes == held
    assert calls.keys() == {"copy_pages", "query", "copy_s"}
    assert 2 * 1000 <= calls["copy_pages"] < 2 * 2 * 1000, "one for each stretch of host memory"
    parking.discard(sequences)
    parking.rest()
    assert parking.held_bytes == 0
    parking.close()


def test_what_is_wanted_now_and_then_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is parked and who is back changes from one step to the next, and so does what the next may want (R17)."""
    monkeypatch.setattr("pyserve.host_arena._SMALLEST_SLAB", 1)
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    parking.arena.idle_s = 0.0  # nothing is kept for its own sake
    sequences = [sequence_of(16, id=number) for number in range(4)]

    def cycle(number: int) -> None:
        sequence = sequences[number % 4]
        parking.prepare(20 if number % 2 else 0)
        round_trip(parking, kv, sequence, [0, 1, 2, 3], [0, 1, 2, 3])
        if number % 3 == 0:
            parking.discard([sequence])

    for sequence in sequences:  # these lie in memory made for them, and what is made ahead stays idle
        round_trip(parking, kv, sequence, [0, 1, 2, 3], [0, 1, 2, 3])
    for number in range(12):
        cycle(number)
    before = parking.arena.num_allocations
    for number in range(1000):
        cycle(number)
    assert parking.arena.num_allocations == before
    monkeypatch.setattr("pyserve.host_room._CALM_S", 0.0)
    parking.prepare(20)
    parking.discard(sequences)
    parking.prepare(0)
    parking.landed()
    assert parking.held_bytes == 0, "what nobody wants goes back"
    parking.close()


def test_parks_that_each_take_a_little_more_do_not_each_have_memory_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyserve.host_arena._SMALLEST_SLAB", 1)
    kv = small_store(64)
    parking = Parking(kv, budget_bytes=1 << 20)
    sequence = sequence_of(0)
    for number in range(1, 61):
        sequence.num_computed += PAGE_SIZE
        parking.prepare(40)
        pages = list(range(number))
        assert park(parking, sequence, pages).ending is Ending.DONE
        restore(parking, sequence, pages)
    assert 2 <= parking.arena.num_allocations <= 1 + 60 // 10
    parking.close()


def test_memory_is_touched_bit_by_bit_and_at_once_when_a_park_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyserve.host_arena._PAUSE_S", 3600.0)
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    parking.prepare(8)
    try:
        assert not parking.arena.wait(0.05), "nobody needs it yet"
        assert park(parking, sequence_of(8), [0, 1]).ending is Ending.DONE
    finally:
        parking.prepare(3000)
        parking.close()  # waits for no pause either
    assert parking.held_bytes == 0


def test_the_second_park_copies_only_what_was_written_since() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    sequence = sequence_of(10)  # two full pages, and two cells of a third
    assert park(parking, sequence, [0, 1, 2]).num_bytes == 3 * kv.page_bytes
    assert restore(parking, sequence, [7, 8, 9]).num_bytes == 3 * kv.page_bytes
    kv.tensor[9] = 1.5  # the third page goes on, and a fourth begins
    kv.tensor[10] = 2.5
    sequence.num_computed = 13
    before = content(kv, [7, 8, 9, 10])
    assert park(parking, sequence, [7, 8, 9, 10]).num_bytes == 2 * kv.page_bytes
    assert restore(parking, sequence, [20, 3, 21, 4]).num_bytes == 4 * kv.page_bytes
    assert torch.equal(content(kv, [20, 3, 21, 4]), before)
    parking.close()


def test_a_park_right_after_a_restore_of_full_pages_copies_nothing() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    sequence = sequence_of(8)
    before = content(kv, [4, 5])
    park(parking, sequence, [4, 5])
    restore(parking, sequence, [6, 7])
    landed = park(parking, sequence, [6, 7])
    assert (landed.ending, landed.num_bytes) == (Ending.DONE, 0)
    restore(parking, sequence, [8, 9])
    assert torch.equal(content(kv, [8, 9]), before)
    parking.close()


def test_kept_pages_give_way_when_the_budget_is_needed() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=8 * kv.page_bytes)
    first, second = sequence_of(16, id=1), sequence_of(24, id=2)
    park(parking, first, [0, 1, 2, 3])
    assert parking.free_pages() == 4
    restore(parking, first, [0, 1, 2, 3])
    assert parking.free_pages() == 8, "what is kept of a running sequence can be taken"
    assert park(parking, second, [4, 5, 6, 7, 8, 9]).ending is Ending.DONE
    assert parking.free_pages() == 2 and parking.held_bytes <= 8 * kv.page_bytes
    landed = park(parking, first, [0, 1, 2, 3])
    assert landed.ending is Ending.NO_ROOM and "no host memory" in landed.error, "refused, not kept"
    assert parking.free_pages() == 2
    parking.close()


def test_a_restore_leaves_the_pages_alone_that_the_prompt_cache_provides() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    sequence = sequence_of(12)
    before = content(kv, [0, 1, 2])
    park(parking, sequence, [0, 1, 2])
    untouched = content(kv, [9])
    landed = restore(parking, sequence, [9, 10, 11], cached_pages=1)
    assert landed.num_bytes == 2 * kv.page_bytes
    assert torch.equal(content(kv, [9]), untouched)
    assert torch.equal(content(kv, [10, 11]), before[1:])
    parking.close()


@pytest.mark.parametrize("page", [0, 3, 6])
def test_a_bit_that_flips_in_memory_is_noticed(page: int) -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20, verify="all")
    sequence = sequence_of(26)
    park(parking, sequence, list(range(7)))
    flip(parking, 0, page)
    landed = restore(parking, sequence, list(range(10, 17)))
    assert landed.ending is Ending.MISMATCH and "not what was parked" in landed.error
    parking.rest()
    assert parking.held_bytes == 0, "what is wrong is not kept"
    parking.close()


def test_sampling_looks_at_every_eighth_page_and_the_last() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20, verify="sample")
    found = []
    for page in range(20):
        sequence = sequence_of(20 * PAGE_SIZE, id=3)
        park(parking, sequence, list(range(20)))
        flip(parking, 3, page)
        if restore(parking, sequence, list(range(20))).ending is Ending.MISMATCH:
            found.append(page)
        parking.discard([sequence])
    assert found == [3, 11, 19]
    parking.close()


def test_verification_off_looks_at_nothing() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20, verify="off")
    sequence = sequence_of(8)
    park(parking, sequence, [0, 1])
    flip(parking, 0, 1)
    assert restore(parking, sequence, [2, 3]).ending is Ending.DONE
    parking.close()


def test_a_park_waits_for_memory_beside_the_loop_and_ends_cleanly_when_its_sequence_does() -> None:
    kv = small_store()
    parking = Parking(kv, budget_bytes=1 << 20)
    first, second = sequence_of(8, id=1), sequence_of(8, id=2)
    before = content(kv, [2, 3])
    parking.park(first, [0, 1], Tier.RAM)
    parking.park(second, [2, 3], Tier.RAM)
    assert parking.is_busy
    parking.discard([first])
    landed = {}
    while len(landed) < 2:
        landed |= {each.sequence.id: each for each in parking.landed()}
    assert landed[2].ending is Ending.DONE
    restore(parking, second, [8, 9])
    assert torch.equal(content(kv, [8, 9]), before)
    parking.discard([second])
    parking.rest()
    assert parking.held_bytes == 0
    parking.close()


def test_what_was_never_parked_cannot_be_restored() -> None:
    parking = Parking(small_store(), budget_bytes=1 << 20)
    landed = restore(parking, sequence_of(8), [0, 1])
    assert landed.ending is Ending.FAILED and "no parked state" in landed.error
    parking.close()
