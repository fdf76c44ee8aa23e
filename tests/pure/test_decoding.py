"""Steps of the same sequences, one behind the other without a plan in between: nothing goes otherwise than with one."""

from __future__ import annotations

import random

import pytest

from pyserve import planner
from pyserve.plan import Limits, Plan, Rows
from pyserve.sequence import Sequence, State
from tests.pure.pool_driver import Driver
from tests.pure.test_random_worlds import random_driver, roomy_limits, walk


class Repeating(Driver):
    """Looks ahead as the engine does: a step is followed by one of the same rows where the ledger allows it."""

    num_repeated = 0
    num_quiet = 0  # plans that said nothing but who runs, without a look at each
    num_calm = 0  # those of them while somebody was parked
    is_repeating = True

    def _plan(self) -> Plan:
        self._check_quiet()
        return super()._plan()

    def _step(self, rows: Rows) -> None:
        while True:
            is_repeated = self.is_repeating and self._do_all_go_on(rows) and self.ledger.may_repeat(rows, self.now_ms)
            super()._step(rows)
            if not is_repeated:
                return
            self._check_quiet()
            if self.is_checked:
                self.ledger.check_integrity()
            self.num_repeated += 1
            self.now_ms += self.step_ms
            rows = rows.behind()

    def _check_quiet(self) -> None:
        view = self.ledger._view
        if view.is_quiet(self.now_ms):
            self.num_quiet += 1
            self.num_calm += bool(view.parked)
            plan = self.plan()
            assert plan == planner.decide(view, self.now_ms, self.ledger._room), "there was something to do"

    def _do_all_go_on(self, rows: Rows) -> bool:
        return bool(rows) and all(map(self._goes_on, rows.sequences))

    def _goes_on(self, sequence: Sequence) -> bool:
        max_tokens = sequence.request.max_tokens
        is_long = max_tokens is not None and sequence.num_generated + 1 >= max_tokens
        return not is_long and len(sequence.tokens) < self.limits.context_len


@pytest.mark.parametrize("first_seed", [0, 100])
def test_in_any_world_cells_tokens_and_pages_are_what_they_have_to_be(first_seed: int) -> None:
    num_repeated = num_quiet = num_calm = 0
    for seed in range(first_seed, first_seed + 100):
        dice = random.Random(seed)
        world = random_driver(dice)
        driver = Repeating(world.limits, world.host_pages, world.disk_pages)
        walk(driver, dice)
        driver.run(driver.patience())
        driver.check_all_ended()
        num_repeated += driver.num_repeated
        num_quiet += driver.num_quiet
        num_calm += driver.num_calm
    assert num_repeated > 1000 and num_quiet > 1000 and num_calm > 100


def test_who_says_the_same_a_little_later_shares_what_comes_back_meanwhile() -> None:
    """A restore takes long; another chat reaches what that one has said, is parked, and comes back behind it."""
    dice = random.Random(2227)
    driver = Repeating(roomy_limits(dice), host_pages=dice.choice([30, 1 << 20, 1 << 20]))
    walk(driver, dice)
    driver.run(driver.patience())
    driver.check_all_ended()


def test_pages_are_taken_when_they_are_with_a_plan_for_every_step() -> None:
    limits = Limits(num_pages=64, page_size=4, num_slots=5)
    planned, repeated = Driver(limits), Repeating(limits)
    for driver in (planned, repeated):
        driver.submit([[number] * (3 + number) for number in range(5)], 24)
        driver.iterate()
    repeated.iterate()
    while planned.num_steps < repeated.num_steps:
        planned.iterate()
    assert repeated.num_repeated > 15
    assert [len(each.tokens) for each in planned.ledger.live()] == [len(each.tokens) for each in repeated.ledger.live()]
    assert planned.ledger.free_pages == repeated.ledger.free_pages
    for driver in (planned, repeated):
        driver.run(100)
        driver.check_all_ended()


def test_who_decodes_is_the_same_list_until_somebody_comes_or_goes() -> None:
    driver = Driver(Limits(num_pages=64, page_size=4, num_slots=5))
    driver.submit([[1, 2, 3], [4, 5]], 50)
    driver.iterate()
    first = driver.ledger.decoding
    driver.iterate()
    assert driver.ledger.decoding is first
    driver.submit([[6]], 50)
    driver.iterate()
    driver.iterate()
    second = driver.ledger.decoding
    assert second is not first and len(first) == 2 and len(second) == 3
    driver.park_all()
    driver.land_all()
    for _ in range(5):
        driver.iterate()
    assert driver.ledger.decoding == second and driver.ledger.decoding is not second, "their pages are others now"


def test_a_plan_is_made_for_whoever_comes_to_the_head_of_the_queue() -> None:
    """It notes since when that one waits for room, which others pass it by in for so long only."""
    driver = Driver(Limits(num_pages=64, page_size=4, num_slots=2))
    driver.submit([[1, 2, 3], [4, 5]], 50)
    driver.iterate()
    rows = driver.iterate().rows
    assert driver.ledger.may_repeat(rows, driver.now_ms)
    waiting = driver.submit([[6]], 50)[0]
    assert not driver.ledger.may_repeat(rows, driver.now_ms)
    driver.iterate()
    assert waiting.waiting_since_ms is not None and driver.ledger.may_repeat(rows, driver.now_ms)


def test_a_parked_one_comes_back_as_soon_as_another_has_made_enough_of_its_text_known() -> None:
    """Nobody came or went, and no page came free: what it lacks has become less."""
    driver = Repeating(Limits(num_pages=26, page_size=1, num_slots=3, runway_steps=2, rotation_delay_ms=1e9))
    driver.is_repeating = False
    first = driver.submit([[1, 2, 3, 4]], 22)[0]
    while first.num_generated < 12:
        driver.iterate()
    second = driver.submit([[1, 2, 3, 4]], 12)[0]
    driver.iterate()
    driver.iterate()
    driver.park_all()
    third = driver.submit([[0]], 20)[0]
    driver.iterate(lambda ids: ids[:0])
    driver.land_all()
    driver.crowd_out()
    driver.iterate()
    driver.cancel(third)
    driver.is_repeating = True
    while first.state is State.PREEMPTED:
        driver.iterate()
    assert second.state is State.RUNNING, "the other had to end first"
    driver.run(driver.patience())
    driver.check_all_ended()
