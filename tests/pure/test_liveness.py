"""Under any pressure everybody finishes, and soon. Each test is a fault that a system like this one really had."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pyserve.plan import Limits
from pyserve.sequence import Sequence, State, Tier
from tests.pure.pool_driver import Driver


def prompt(length: int, start: int = 0) -> list[int]:
    """Prompts with different starts have no page in common."""
    return [start // 5**index % 5 for index in range(min(4, length))] + [index % 5 for index in range(4, length)]


def driver_of(cells: int, page_size: int = 16, num_slots: int = 4, host_pages: int = 1 << 20, **limits: Any) -> Driver:
    return Driver(Limits(cells // page_size, page_size, num_slots, **limits), host_pages)


def until_parked(driver: Driver, sequence: Sequence, max_iterations: int = 500) -> None:
    for _ in range(max_iterations):
        if sequence.state in (State.PREEMPTING, State.PREEMPTED):
            return
        driver.iterate()
    raise AssertionError(f"{sequence} was not parked")


def tokens_between_parks(driver: Driver) -> list[int]:
    """For each park but a sequence's first: what it generated since the one before."""
    last: dict[int, int] = {}
    gained = []
    for id, _, _, num_generated in driver.park_log:
        if id in last:
            gained.append(num_generated - last[id])
        last[id] = num_generated
    return gained


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("host_pages", [1 << 20, 0], ids=["ram", "recompute"])
def test_four_chats_on_a_full_pool_all_finish(page_size: int, is_async: bool, host_pages: int) -> None:
    driver = driver_of(1024, page_size, host_pages=host_pages, is_async=is_async)
    driver.is_checked = page_size > 1
    for start in range(4):
        driver.submit([prompt(200, start)], 600)
    driver.run(3000)
    assert len(driver.finished) == 4 and not driver.failed
    assert 0 < len(driver.park_log) == len(driver.restore_log) <= 12, "a chat was parked again and again"


@pytest.mark.parametrize("is_planner_on", [True, False], ids=["planner", "last resort"])
def test_two_prompts_that_each_fill_the_pool_both_finish(is_planner_on: bool) -> None:
    driver = driver_of(256, is_planner_on=is_planner_on)
    driver.submit([prompt(252)], None)
    driver.submit([prompt(252, 1)], None)
    driver.run(200)
    assert [len(each.tokens) for each in driver.finished] == [257, 257]
    assert not driver.failed


def test_a_prompt_that_can_never_fit_ends_alone() -> None:
    driver = driver_of(256)
    driver.submit([prompt(20)], 30)
    (hopeless,) = driver.submit([prompt(257)], 1)
    driver.submit([prompt(40, 2)], 30)
    driver.iterate()
    assert [(sequence, reason) for sequence, reason in driver.failed] == [(hopeless, "never_fits")]
    driver.run(100)
    assert len(driver.finished) == 2


def test_a_sequence_alone_fills_the_pool_to_its_last_cell_and_is_never_parked() -> None:
    driver = driver_of(256)
    (only,) = driver.submit([prompt(100)], None)
    driver.run(300)
    assert len(only.tokens) == 257 and not driver.park_log


def test_finished_chats_give_way_before_a_running_one_waits() -> None:
    driver = driver_of(256)
    driver.submit([prompt(200)], 10)
    driver.run(50)
    assert driver.ledger.cached_pages == 13
    driver.submit([prompt(100, 2)], None)
    driver.run(200)
    assert not driver.park_log
    assert sum(plan.num_evictions for plan in driver.plans) == 13


def test_two_sequences_come_back_whole_or_not_at_all() -> None:
    """Never one half of each, waiting for the other halves."""
    driver = driver_of(512, num_slots=3)
    chats = [driver.submit([prompt(150, start)], 350)[0] for start in range(3)]
    for _ in range(3000):
        if driver.ledger.is_idle:
            break
        driver.iterate(lambda ids: ids[:0])  # every copy takes as long as the engine lets it
        for restore in driver.plans[-1].restores:
            assert len(restore.sequence.pages) * 16 >= len(restore.sequence.tokens)
    assert sorted(each.id for each in driver.finished) == [each.id for each in chats]


def test_a_long_recomputation_is_not_parked_again_at_its_first_chunk() -> None:
    driver = driver_of(512, num_slots=3, host_pages=0, batch_tokens=16)
    for start in range(3):
        driver.submit([prompt(150, start)], 300)
    driver.run(3000)
    assert len(driver.finished) == 3
    assert min(tokens_between_parks(driver), default=8) >= 8, "parked before it got anywhere"
    assert max(each.num_parks for each in driver.finished) <= 4


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_restored_sequence_has_its_runway(page_size: int) -> None:
    driver = driver_of(400, page_size, num_slots=8)
    for start in range(8):
        driver.submit([prompt(20 + 3 * start, start)], 200)
    driver.run(6000)
    assert len(driver.finished) == 8
    assert min(tokens_between_parks(driver)) >= 8


def test_the_rate_comes_back_after_pressure() -> None:
    driver = driver_of(512)
    for start in range(4):
        driver.submit([prompt(60, start)], 200)
    driver.run(3000)
    assert driver.park_log
    before = len(driver.plans)
    for start in range(4):
        driver.submit([prompt(60, start)], 40)
    driver.run(60)
    assert [len(plan.rows) for plan in driver.plans[before + 2 : before + 38]] == [4] * 36


def test_single_tokens_on_pages_of_64_count_as_pages() -> None:
    """Planned in tokens, these five would fit."""
    driver = driver_of(256, 64, num_slots=5)
    for start in range(5):
        driver.submit([prompt(1, start)], 100)
    driver.run(2000)
    assert len(driver.finished) == 5


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("host_pages", [1 << 20, 0], ids=["ram", "recompute"])
@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "synchronous"])
def test_forced_parks_come_once_per_so_many_tokens(page_size: int, host_pages: int, is_async: bool) -> None:
    driver = driver_of(256, page_size, host_pages=host_pages, is_async=is_async, preempt_every=8)
    (only,) = driver.submit([prompt(30)], 100)
    driver.run(1000)
    parks = [(reason, num_generated) for _, reason, _, num_generated in driver.park_log]
    assert parks == [("forced", num_generated) for num_generated in range(8, 100, 8)]
    assert len(driver.restore_log) == only.num_parks == 12


def test_a_park_in_flight_is_waited_for_before_anybody_else_leaves() -> None:
    """The last resort (R19)."""
    driver = driver_of(256, num_slots=3, is_planner_on=False)
    for start in range(3):
        driver.submit([prompt(60, start)], 150)
    while not driver.is_waiting:
        driver.iterate(lambda ids: ids[:0])
    assert [reason for _, reason, _, _ in driver.park_log] == ["last_resort"] and not driver.failed
    assert all(len(each.pages) * 16 == len(each.tokens) - 1 for each in driver.ledger.running()), "all cells are used"
    driver.run(5000)
    assert len(driver.finished) == 3


def test_with_parking_off_exactly_the_largest_ends() -> None:
    driver = driver_of(256, is_parking_on=False, num_slots=3)
    small, large, middle = (driver.submit([prompt(n, n)], 150)[0] for n in (40, 90, 60))
    while not driver.failed:
        plan = driver.iterate()
    assert [(sequence, reason) for sequence, reason in driver.failed] == [(large, "pool_full")]
    assert {row.sequence for row in plan.rows} == {small, middle}, "the rest carry on in the same iteration"
    driver.run(1000)
    assert len(driver.failed) + len(driver.finished) == 3


def test_parking_goes_on_when_the_host_is_full() -> None:
    driver = driver_of(512, host_pages=9)
    for start in range(4):
        driver.submit([prompt(100, start)], 250)
    driver.run(5000)
    assert len(driver.finished) == 4 and not driver.failed
    tiers = Counter(tier for _, _, tier, _ in driver.park_log)
    assert tiers[Tier.RECOMPUTE]


def test_slow_copies_never_stop_the_others() -> None:
    """While a park hangs, the leader decodes in every iteration that the runway covers."""
    driver = driver_of(512, num_slots=2)
    leader = driver.submit([prompt(200)], 300)[0]
    small = driver.submit([prompt(150, 1)], 200)[0]
    until_parked(driver, small)
    before = leader.num_generated
    for _ in range(8):
        driver.iterate(lambda ids: ids[:0])
    assert small.state is State.PREEMPTING
    assert leader.num_generated == before + 8


def test_the_engine_waits_for_a_copy_only_when_nobody_can_run() -> None:
    driver = driver_of(256, num_slots=2)
    driver.submit([prompt(100)], 150)
    driver.submit([prompt(60, 1)], 150)
    for _ in range(1000):
        if driver.ledger.is_idle:
            break
        plan = driver.iterate(lambda ids: ids[:0])
        assert not (plan.must_wait_for_copy and plan.rows)
    assert len(driver.finished) == 2
