"""Sequences that come back together hold what they have in common once, whatever becomes of its copy (R11, R12a)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pyserve.plan import Limits
from pyserve.sequence import Sequence, State, Tier
from tests.pure.pool_driver import Driver

NUM_MEMBERS = 4
PREFIX_LEN = 48
FOREVER = 1 << 20


def parked_group(page_size: int, num_pages: int = 1000) -> tuple[Driver, list[Sequence]]:
    """Prompts that begin alike and part, all parked with some of their answer, and nothing in flight."""
    limits = Limits(num_pages, page_size, NUM_MEMBERS + 1, runway_steps=2, preempt_every=FOREVER)
    driver = Driver(limits)
    prefix = [number % 5 for number in range(PREFIX_LEN)]
    group = driver.submit([[*prefix, 0]], 40)
    driver.iterate()
    group += driver.submit([[*prefix, number] for number in range(1, NUM_MEMBERS)], 40)
    for _ in range(6):
        driver.iterate()
    driver.park_all()
    driver.land_all()
    assert all(each.state is State.PREEMPTED for each in group)
    return driver, group


def in_use(driver: Driver) -> int:
    return driver.ledger.held_pages + driver.ledger.transfer_pages


def come_back(driver: Driver) -> None:
    """All that fit are on their way; nothing lands."""
    driver.carry_out(driver.ledger.plan(driver.now_ms, FOREVER))
    driver.ledger.check_integrity()


def finish(driver: Driver) -> None:
    """Everybody ends and has said what it would have said alone."""
    driver.run(driver.patience())
    driver.check_all_ended()


class Looked(list[int]):
    """Tokens that count how many of all such were looked at."""

    num_tokens = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Looked.num_tokens += len(found) if isinstance(place, slice) else 1
        return found


PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
PLACES = pytest.mark.parametrize("is_cached", [True, False], ids=["in the pool", "elsewhere"])


@PAGE_SIZES
@PLACES
def test_a_group_that_comes_back_holds_its_prefix_once(page_size: int, is_cached: bool) -> None:
    driver, group = parked_group(page_size)
    if not is_cached:
        driver.crowd_out()
    come_back(driver)
    prefix = PREFIX_LEN // page_size
    num_own = sum(len(each.pages) - prefix for each in group)
    assert all(each.state is State.RESTORING for each in group) or (is_cached and page_size == 1)
    assert len({page for each in group for page in each.pages[:prefix]}) == prefix
    assert in_use(driver) == prefix + num_own
    assert driver.num_adopted == (0 if is_cached else NUM_MEMBERS - 1)
    driver.land_all()
    assert all(each.state is State.RUNNING for each in group) and in_use(driver) == prefix + num_own
    for each in group[:-1]:
        driver.cancel(each)
    assert in_use(driver) == len(group[-1].pages), "the prefix stays with the last that holds it"
    finish(driver)


@PAGE_SIZES
@PLACES
@pytest.mark.parametrize("num_missing", [0, 1])
def test_all_come_back_at_once_where_there_is_room_for_the_prefix_once(
    page_size: int, is_cached: bool, num_missing: int
) -> None:
    driver, group = parked_group(page_size)
    if not is_cached:
        driver.crowd_out()
    view = driver.ledger._view
    prefix = PREFIX_LEN // page_size
    exact = prefix + sum(view.wanted_pages(each, view.entry_runway) - prefix for each in group)
    view.pool.allocate(1000 - exact + num_missing)  # the rest is somebody else's
    plan = driver.ledger.plan(driver.now_ms, FOREVER)
    assert len(plan.restores) == NUM_MEMBERS - num_missing
    driver.carry_out(plan)
    assert num_missing or driver.ledger.free_pages + driver.ledger.cached_pages == 0
    driver.land_all()
    assert sum(each.state is State.RUNNING for each in group) == NUM_MEMBERS - num_missing


@pytest.mark.parametrize("num_missing", [0, 1])
def test_newcomers_of_one_moment_take_a_cached_prompt_once(num_missing: int) -> None:
    driver = Driver(Limits(100, 4, 3, runway_steps=0))
    prefix = [number % 5 for number in range(40)]
    driver.submit([[*prefix, 0]], 1)
    driver.run(5)
    driver.submit([[*prefix, number] for number in (1, 2, 3)], 1)
    driver.ledger._view.pool.allocate(87 + num_missing)  # ten are left for the prefix and three for the rest
    plan = driver.ledger.plan(driver.now_ms, FOREVER)
    assert [admission.cached_pages for admission in plan.admissions] == [10] * (3 - num_missing)


@PAGE_SIZES
def test_one_that_comes_later_takes_pages_that_are_still_being_filled(page_size: int) -> None:
    driver, group = parked_group(page_size)
    driver.crowd_out()
    late = group[-1]
    plan = driver.ledger.plan(driver.now_ms, FOREVER)
    driver.carry_out(replace(plan, restores=plan.restores[:-1]))
    assert late.state is State.PREEMPTED
    num_before = in_use(driver)
    come_back(driver)
    assert late.state is State.RESTORING
    assert in_use(driver) - num_before == len(late.pages) - PREFIX_LEN // page_size
    finish(driver)


def test_a_newcomer_does_not_take_pages_that_are_being_filled() -> None:
    driver, group = parked_group(4)
    driver.crowd_out()
    come_back(driver)
    newcomer = driver.submit([group[0].tokens[:]], 3)[0]
    come_back(driver)
    assert newcomer.state is State.RUNNING and newcomer.num_cached == 0
    assert not set(newcomer.pages).intersection(*(each.pages for each in group))
    finish(driver)


@PAGE_SIZES
@pytest.mark.parametrize("order", ["first", "own copies first"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["good", "bad"])
def test_when_the_copy_of_the_prefix_fails_the_others_come_back_alone_or_are_computed_again(
    page_size: int, order: str, is_kept: bool
) -> None:
    """By their own parked state, if that is good."""
    driver, group = parked_group(page_size)
    driver.are_forsaken_kept = is_kept
    num_parked = [each.num_computed for each in group[1:]]
    driver.crowd_out()
    come_back(driver)
    first, others = group[0], group[1:]
    assert driver.in_flight() == [first.id]
    driver.land(first.id, is_failed=True)
    driver.ledger.check_integrity()
    assert first.state is State.RUNNING and first.num_computed == 0
    assert len(first.pages) + sum(len(each.pages) for each in others) == in_use(driver), "the prefix is let go at once"
    come_back(driver)
    for each in others if order == "first" else reversed(others):
        assert each.state is State.RESTORING, "its own copy may still write to its pages"
        driver.land(each.id)
        assert (each.state, each.pages) == (State.PREEMPTED, [])
        assert each.tier is (Tier.RAM if is_kept else Tier.RECOMPUTE)
        driver.ledger.check_integrity()
    assert [each.num_computed for each in others] == (num_parked if is_kept else [0] * len(others))
    come_back(driver)
    driver.land_all()
    assert all(each.num_computed >= PREFIX_LEN for each in others) == is_kept, "nothing of it is computed twice"
    finish(driver)


@PAGE_SIZES
def test_a_prefix_whose_sequence_ends_is_filled_for_the_others(page_size: int) -> None:
    driver, group = parked_group(page_size)
    driver.crowd_out()
    come_back(driver)
    driver.cancel(group[0])
    assert driver.in_flight() == [group[0].id], "its copy goes on"
    driver.land_all()
    assert all(each.state is State.RUNNING and each.num_computed >= PREFIX_LEN for each in group[1:])
    prefix = PREFIX_LEN // page_size
    assert in_use(driver) == prefix + sum(len(each.pages) - prefix for each in group[1:])
    finish(driver)


@PAGE_SIZES
def test_a_prefix_whose_sequence_ends_and_whose_copy_fails_is_computed_again(page_size: int) -> None:
    driver, group = parked_group(page_size)
    driver.crowd_out()
    come_back(driver)
    driver.cancel(group[0])
    driver.cancel(group[1])
    driver.land(group[0].id, is_failed=True)
    driver.land_all()
    assert [each.state for each in group[2:]] == [State.PREEMPTED, State.PREEMPTED]
    finish(driver)


@PAGE_SIZES
def test_a_prefix_that_is_overdue_is_not_waited_for_and_its_pages_stay_out_of_use(page_size: int) -> None:
    driver, group = parked_group(page_size)
    driver.crowd_out()
    come_back(driver)
    ledger, first = driver.ledger, group[0]
    driver.are_forsaken_kept = False
    pages = list(first.pages)
    del driver.restores_in_flight[first.id], driver.host[first.id]
    ledger.copy_overdue(first, 7, driver.now_ms)
    ledger.check_integrity()
    for each in group[1:]:
        driver.restores_in_flight[each.id].is_forsaken = True
    driver.land_all()
    assert all(each.state is State.PREEMPTED for each in group)
    come_back(driver)
    assert all(each.state is State.RUNNING and not set(pages).intersection(each.pages) for each in group)
    assert ledger.transfer_pages == len(pages)
    for _ in range(3):
        driver.iterate()
    ledger.overdue_landed(7)
    assert ledger.transfer_pages == 0
    finish(driver)


def test_the_plan_for_a_group_looks_at_each_prompt_a_few_times_however_many_there_are() -> None:
    """What two have in common is compared once, and not for each pair: 64 chats with a long prompt held up the loop."""
    num_members, prefix_len = 40, 400
    driver = Driver(Limits(5000, 4, num_members, batch_tokens=1 << 20, runway_steps=2, preempt_every=FOREVER))
    group = driver.submit(
        [[number % 5 for number in range(prefix_len)] + [0, number] for number in range(num_members)], 40
    )
    driver.iterate()
    driver.iterate()
    driver.park_all()
    driver.land_all()
    driver.crowd_out()
    for each in group:
        each.tokens = Looked(each.tokens)
    Looked.num_tokens = 0
    plan = driver.ledger.plan(driver.now_ms, FOREVER)
    assert [each.cached_pages for each in plan.restores] == [0] + [prefix_len // 4] * (num_members - 1)
    assert Looked.num_tokens < 12 * num_members * prefix_len


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_pressed", [False, True], ids=["room", "little room"])
def test_what_several_begin_with_is_computed_again_once(page_size: int, is_pressed: bool) -> None:
    """No tier keeps anything: the first computes it, the others take it from the prompt cache."""
    prefix_len = 320
    limits = Limits(
        (720 if is_pressed else 2400) // page_size, page_size, 4, batch_tokens=96, runway_steps=2, preempt_every=FOREVER
    )
    driver = Driver(limits, host_pages=0)
    prefix = [number % 5 for number in range(prefix_len)]
    group = driver.submit([[*prefix, 0]], 40)
    while not group[0].is_generating:
        driver.iterate()
    group += driver.submit([[*prefix, number] for number in range(1, 4)], 40)
    for _ in range(6):
        driver.iterate()
    assert all(each.is_generating for each in group)
    driver.park_all()
    driver.crowd_out()
    assert [each.tier for each in group] == [Tier.RECOMPUTE] * 4
    num_own = sum(len(each.tokens) - prefix_len for each in group)
    num_computed = num_steps = 0
    while not all(each.state is State.RUNNING and each.num_pending == 1 for each in group):
        num_computed += sum(row.length for row in driver.iterate().rows if row.length > 1)
        num_steps += 1
    assert num_computed <= prefix_len + num_own + 4 * 64
    assert num_steps <= -(-num_computed // 96) + 2, "nobody waited for nothing"
    finish(driver)


def test_one_that_computes_again_for_the_others_may_leave() -> None:
    limits = Limits(600, 4, 3, batch_tokens=64, runway_steps=2, preempt_every=FOREVER)
    driver = Driver(limits, host_pages=0)
    prefix = [number % 5 for number in range(320)]
    group = driver.submit([[*prefix, number] for number in range(3)], 40)
    while not all(each.is_generating for each in group):
        driver.iterate()
    driver.park_all()
    driver.crowd_out()
    driver.iterate()
    first, second, third = group
    assert [each.state for each in group] == [State.RUNNING, State.PREEMPTED, State.PREEMPTED]
    driver.cancel(first)
    driver.iterate()
    assert [each.state for each in (second, third)] == [State.RUNNING, State.PREEMPTED]
    finish(driver)
