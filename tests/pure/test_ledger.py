"""Ends and landings in every order: nothing stays behind, nothing is given away too early (R13, R20)."""

from __future__ import annotations

import pytest

from pyserve import residents
from pyserve.sequence import Sequence, State, Tier
from tests.pure.pool_driver import Driver
from tests.pure.test_liveness import driver_of, prompt, until_parked


def parked_beside_a_leader() -> tuple[Driver, Sequence]:
    """A sequence whose copy out has just begun, and one that goes on."""
    driver = driver_of(256, num_slots=2)
    driver.submit([prompt(120)], 100)
    small = driver.submit([prompt(80, 1)], 100)[0]
    until_parked(driver, small)
    assert small.state is State.PREEMPTING
    return driver, small


def until_restoring(driver: Driver, sequence: Sequence) -> None:
    for _ in range(300):
        if sequence.state is State.RESTORING:
            return
        driver.iterate()
    raise AssertionError(f"{sequence} was not restored")


def test_pages_of_a_park_in_flight_are_in_transfer_until_it_lands() -> None:
    driver, small = parked_beside_a_leader()
    ledger = driver.ledger
    num_pages = len(small.pages)
    before = ledger.transfer_pages, ledger.free_pages + ledger.cached_pages
    driver.land(small.id)
    assert before[0] == num_pages and ledger.transfer_pages == 0
    assert ledger.free_pages + ledger.cached_pages == before[1] + num_pages
    assert small.state is State.PREEMPTED and not small.pages


def test_a_cancel_during_a_park_takes_effect_when_the_copy_lands() -> None:
    driver, small = parked_beside_a_leader()
    slot, pages = small.slot, list(small.pages)
    assert slot is not None
    assert driver.ledger.finish(small, driver.now_ms) is False
    assert small.state is State.FINISHED and small.pages == pages
    assert driver.ledger.sequence_in_slot(slot) is small
    driver.ledger.check_integrity()
    driver.cancelled.append(small)
    driver.land(small.id)
    assert driver.ledger.sequence_in_slot(slot) is None and not small.pages
    assert driver.ledger.finish(small, driver.now_ms) is True
    driver.run(300)
    driver.check_all_ended()


@pytest.mark.parametrize("is_failed", [False, True], ids=["landed", "failed"])
def test_a_cancel_during_a_restore_takes_effect_when_the_copy_lands(is_failed: bool) -> None:
    driver, small = parked_beside_a_leader()
    until_restoring(driver, small)
    driver.cancel(small)
    driver.ledger.check_integrity()
    assert small.pages
    driver.land(small.id, is_failed=is_failed)
    assert not small.pages and driver.ledger.transfer_pages == 0
    driver.run(300)
    driver.check_all_ended()


def back_from_a_park(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, Sequence]:
    """A sequence that runs again, most of whose pages the prompt cache has not been told of yet."""
    monkeypatch.setattr(residents, "TOLD_AT_ONCE", 2)
    driver, small = parked_beside_a_leader()
    driver.land(small.id)
    driver.ledger._view.cache.evict(driver.ledger.cached_pages)
    until_restoring(driver, small)
    driver.land(small.id)
    assert small.state is State.RUNNING and num_known(driver, small) == 2
    return driver, small


def num_full(driver: Driver, sequence: Sequence) -> int:
    return sequence.num_computed // driver.ledger.limits.page_size


def num_known(driver: Driver, sequence: Sequence) -> int:
    """Pages that the prompt cache would give to one with the same tokens."""
    return len(driver.ledger._view.cache.match(sequence.tokens, num_full(driver, sequence)))


def test_pages_that_come_back_are_told_to_the_prompt_cache_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, small = back_from_a_park(monkeypatch)
    for _ in range(200):
        before = num_known(driver, small)
        driver.iterate()
        if small.state is not State.RUNNING or num_known(driver, small) == num_full(driver, small):
            break
        assert num_known(driver, small) <= before + 2
    assert small.state is State.RUNNING and num_known(driver, small) == num_full(driver, small)
    driver.run(300)
    driver.check_all_ended()


def test_what_has_come_back_and_ends_at_once_is_all_there_for_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, small = back_from_a_park(monkeypatch)
    driver.cancel(small)
    assert num_known(driver, small) == num_full(driver, small) > 4
    driver.ledger.check_integrity()


def test_a_cancel_of_a_parked_one_frees_its_slot_at_once() -> None:
    driver, small = parked_beside_a_leader()
    driver.land(small.id)
    slot = small.slot
    assert slot is not None
    driver.cancel(small)
    assert driver.ledger.sequence_in_slot(slot) is None
    assert driver.ledger.num_parked == 0 and small.id not in driver.host


def test_a_failed_park_is_computed_again() -> None:
    driver, small = parked_beside_a_leader()
    driver.land(small.id, is_failed=True)
    assert (small.state, small.tier, small.num_computed) == (State.PREEMPTED, Tier.RECOMPUTE, 0)
    driver.run(500)
    assert small in driver.finished and len(small.tokens) == 180


def test_a_failed_restore_is_computed_again_in_the_pages_it_has() -> None:
    driver, small = parked_beside_a_leader()
    until_restoring(driver, small)
    driver.land(small.id, is_failed=True)
    assert small.state is State.RUNNING and small.num_computed < small.prompt_len and small.pages
    driver.run(500)
    assert small in driver.finished and len(small.tokens) == 180


def test_a_parked_sequence_keeps_its_slot_and_its_times_add_up() -> None:
    driver, small = parked_beside_a_leader()
    slot, parked_at_ms = small.slot, small.parked_at_ms
    assert parked_at_ms is not None
    until_restoring(driver, small)
    assert small.slot == slot
    assert small.preempted_ms == driver.now_ms - driver.step_ms - parked_at_ms


def test_only_a_running_sequence_can_be_parked() -> None:
    driver, small = parked_beside_a_leader()
    driver.ledger.park_landed(small)
    with pytest.raises(AssertionError, match="no park of"):
        driver.ledger.park_landed(small)


def test_the_pages_of_a_finished_chat_serve_the_next() -> None:
    driver = driver_of(512)
    first = driver.submit([prompt(64)], 40)[0]
    driver.run(60)
    again = driver.submit([first.tokens], 5)[0]
    driver.run(60)
    assert again.num_cached == 96, "103 cells were computed: six full pages"


def test_a_cancel_while_waiting_leaves_no_trace() -> None:
    driver = driver_of(256, num_slots=1)
    driver.submit([prompt(20)], 20)
    late = driver.submit([prompt(20, 1)], 20)[0]
    driver.iterate()
    driver.cancel(late)
    assert driver.ledger.num_waiting == 0
    driver.run(50)
    driver.check_all_ended()
