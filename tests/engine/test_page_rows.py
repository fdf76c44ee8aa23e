"""Parks and restores by rows of the page table: the runner's, which its steps go on using (R13, R16, R20, R38)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from pyserve.kv_store import KvStore
from pyserve.park import Ending
from pyserve.pool import Pool
from pyserve.runner import Runner
from pyserve.sequence import Sequence, Tier
from tests.engine.parked import (
    check_host_memory,
    content,
    finish,
    one,
    park,
    parking_of,
    restore,
    sequence_of,
    small_store,
)

PAGES, OTHERS, BACK = [9, 8, 7, 1, 2, 20, 22, 24], [0, 3, 4, 5, 6, 10, 11, 12], [30, 29, 28, 13, 14, 15, 25, 26]
TIERS = pytest.mark.parametrize("tier", [Tier.RAM, Tier.DISK])


def runner_of(kv: KvStore) -> Runner:
    """One that keeps the page table, and runs nothing."""
    return Runner(None, kv, num_slots=2, pages_per_sequence=32)  # type: ignore[arg-type]


def resident(num_computed: int, pages: list[int], *, id: int = 0) -> Sequence:
    sequence = sequence_of(num_computed, id=id)
    sequence.slot, sequence.pages = 0, list(pages)
    return sequence


@TIERS
def test_what_goes_by_a_row_comes_back_by_a_row(tmp_path: Path, tier: Tier) -> None:
    kv = small_store()
    parking, runner = parking_of(kv, tmp_path), runner_of(kv)
    sequence = resident(30, PAGES)
    before = content(kv, PAGES)
    assert park(parking, sequence, runner.pages_of(sequence), tier).ending is Ending.DONE
    kv.tensor.view(torch.uint8)[PAGES] = 0xEE
    sequence.pages = list(BACK)
    shared = content(kv, BACK[:2])
    assert restore(parking, sequence, runner.pages_of(sequence), cached_pages=2).ending is Ending.DONE
    assert torch.equal(content(kv, BACK[2:]), before[2:])
    assert torch.equal(content(kv, BACK[:2]), shared), "what others have was written"
    finish(parking)


@TIERS
def test_a_park_that_waits_keeps_its_pages_when_its_slot_goes_to_another(tmp_path: Path, tier: Tier) -> None:
    kv = small_store()
    parking, runner = parking_of(kv, tmp_path), runner_of(kv)
    gate = threading.Event()
    make_slab = parking.arena.allocate
    parking.arena.allocate = lambda num_bytes: (gate.wait(5), make_slab(num_bytes))[1]  # memory is not there yet
    assert parking.disk is not None
    parking.disk._thread.submit(gate.wait, 5)  # nor is the disk's turn
    sequence, newcomer = resident(30, PAGES), resident(30, OTHERS, id=1)
    before = content(kv, PAGES)
    parking.park(sequence, runner.pages_of(sequence), tier)
    assert parking.landed() == []
    assert runner.pages_of(newcomer).tolist() == OTHERS
    gate.set()
    assert one(parking).ending is Ending.DONE
    kv.tensor.view(torch.uint8)[PAGES] = 0xEE
    sequence.slot, sequence.pages = 1, list(BACK)
    assert restore(parking, sequence, runner.pages_of(sequence)).ending is Ending.DONE
    assert torch.equal(content(kv, BACK), before)
    finish(parking)


def test_a_restore_that_waits_for_the_disk_keeps_its_pages_when_its_slot_goes_to_another(tmp_path: Path) -> None:
    kv = small_store()
    parking, runner = parking_of(kv, tmp_path), runner_of(kv)
    sequence, newcomer = resident(30, PAGES), resident(30, OTHERS, id=1)
    before = content(kv, PAGES)
    park(parking, sequence, runner.pages_of(sequence), Tier.DISK)
    gate = threading.Event()
    assert parking.disk is not None
    parking.disk._thread.submit(gate.wait, 5)
    sequence.pages = list(BACK)
    assert parking.restore(sequence, runner.pages_of(sequence), cached_pages=0)
    others = content(kv, OTHERS)
    runner.pages_of(newcomer)
    gate.set()
    assert one(parking).ending is Ending.DONE
    assert torch.equal(content(kv, BACK), before)
    assert torch.equal(content(kv, OTHERS), others), "pages of the newcomer were written"
    finish(parking)


def test_a_restore_that_shares_pages_waits_for_the_one_that_fills_them(tmp_path: Path) -> None:
    kv = small_store()
    parking, runner = parking_of(kv, tmp_path), runner_of(kv)
    first, second = resident(30, PAGES), resident(30, OTHERS, id=1)
    second.slot = 1
    for sequence in (first, second):
        park(parking, sequence, runner.pages_of(sequence), Tier.DISK)
    gate = threading.Event()
    assert parking.disk is not None
    parking.disk._thread.submit(gate.wait, 5)
    first.pages, second.pages = list(BACK), [*BACK[:2], 16, 17, 18, 19, 21, 23]
    for sequence, cached_pages in ((first, 0), (second, 2)):
        assert parking.restore(sequence, runner.pages_of(sequence), cached_pages=cached_pages)
    assert [len(copy.behind) for copy in parking.copies] == [0, 1]
    gate.set()
    assert {one(parking).ending for _ in range(2)} == {Ending.DONE}
    check_host_memory(parking)
    finish(parking)


def test_a_row_is_read_from_the_parts_of_its_pages() -> None:
    """Where it is not known yet; in any other case they are not looked at."""
    sequence = resident(30, [*range(700, 800), *PAGES, *range(200, 500), 9, 11])
    pool = Pool(1000)
    runner = Runner(None, small_store(), num_slots=2, pages_per_sequence=1000)  # type: ignore[arg-type]
    assert len(list(pool.parts(sequence.pages))) > 2
    assert runner.pages_of(sequence, pool.parts(sequence.pages)).tolist() == sequence.pages
    sequence.pages += [1, 2]
    assert runner.pages_of(sequence, iter(["not looked at"])).tolist() == sequence.pages  # type: ignore[list-item]
    sequence.pages = list(PAGES)
    assert runner.pages_of(sequence, pool.parts(PAGES[:5])).tolist() == PAGES


def test_a_row_follows_its_list() -> None:
    """Growing by one page, by many, cut off at its end, and another list of the same length in its place."""
    runner = runner_of(small_store())
    sequence = resident(30, PAGES)
    row = runner.pages_of(sequence)
    sequence.pages.append(25)
    assert runner.pages_of(sequence).tolist() == [*PAGES, 25]
    sequence.pages += [26, 27]
    assert runner.pages_of(sequence).tolist() == [*PAGES, 25, 26, 27]
    del sequence.pages[8:]
    assert runner.pages_of(sequence).tolist() == PAGES
    sequence.pages = list(BACK)
    assert runner.pages_of(sequence).tolist() == BACK
    assert row.tolist() == PAGES, "a row that was handed out has changed"
    sequence.pages = []
    assert runner.pages_of(sequence).tolist() == []
