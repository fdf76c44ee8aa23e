"""Who is parked, who comes back, who is let in."""

from __future__ import annotations

import pytest

from pyserve.errors import Unavailable
from pyserve.plan import Limits
from pyserve.prefix import Node
from pyserve.sequence import State, Tier
from tests.pure.pool_driver import Driver
from tests.pure.test_liveness import driver_of, prompt, until_parked


def test_the_smallest_is_parked_and_the_leader_never() -> None:
    driver = driver_of(512, num_slots=3)
    leader, small, middle = (driver.submit([prompt(n, n)], 400)[0] for n in (200, 60, 100))
    until_parked(driver, small)
    assert middle.num_parks == leader.num_parks == 0
    driver.run(4000)
    assert len(driver.finished) == 3


def test_shared_pages_do_not_count_as_ones_own() -> None:
    """Two share a long prompt: each holds more pages than the third, but gives fewer."""
    driver = driver_of(1024, num_slots=4)
    first, second = driver.submit([prompt(320)] * 2, 500, is_led=True)
    for _ in range(4):
        driver.iterate()
    alone = driver.submit([prompt(64, 3)], 500)[0]
    leader = driver.submit([prompt(400, 1)], 500)[0]
    until_parked(driver, second)
    assert len(second.pages) >= len(first.pages) - 1 > len(alone.pages)
    assert alone.num_parks == leader.num_parks == 0


def test_a_restored_group_member_takes_its_shared_pages_without_a_copy() -> None:
    driver = driver_of(512, num_slots=3, preempt_every=10)
    group = driver.submit([prompt(160)] * 3, 60, is_led=True)
    driver.run(1000)
    assert len(driver.finished) == len(group)
    shared = [restore.cached_pages for plan in driver.plans for restore in plan.restores]
    assert max(shared) >= 10


def test_a_group_waits_for_its_leader_to_compute_the_prompt() -> None:
    driver = driver_of(512, batch_tokens=64)
    leader, *others = driver.submit([prompt(160)] * 3, 5, is_led=True)
    driver.iterate()
    assert leader.state is State.RUNNING and all(each.state is State.WAITING for each in others)
    driver.iterate()
    driver.iterate()
    assert leader.is_generating
    driver.iterate()
    assert [each.num_cached for each in others] == [144, 144]  # a whole match leaves its last page to compute
    driver.run(50)


def test_a_group_whose_leader_is_cancelled_gets_another() -> None:
    driver = driver_of(512, batch_tokens=64)
    leader, second, third = driver.submit([prompt(160)] * 3, 5, is_led=True)
    driver.iterate()
    driver.cancel(leader)
    driver.iterate()
    assert second.state is State.RUNNING and third.state is State.WAITING
    driver.run(50)
    assert third.num_cached == 144


def test_the_starved_are_passed_over() -> None:
    driver = driver_of(512, num_slots=3)
    leader, small, middle = (driver.submit([prompt(n, n)], 400)[0] for n in (200, 60, 100))
    driver.iterate()
    small.num_parks = 3
    until_parked(driver, middle)
    assert small.num_parks == 3 and leader.num_parks == 0


def test_a_small_one_passes_a_big_one_that_does_not_fit_yet() -> None:
    """R6, without rotation: the big one waits for the leader, the small one does not."""
    driver = driver_of(512, num_slots=3, rotation_delay_ms=1e9)
    leader = driver.submit([prompt(240)], 200)[0]
    big = driver.submit([prompt(128, 1)], 200)[0]
    small = driver.submit([prompt(30, 2)], 200)[0]
    until_parked(driver, small)
    until_parked(driver, big)
    while driver.in_flight():
        driver.iterate()
    big.num_parks = 9  # head of the queue
    assert driver.ledger.parked()[0] is big
    while not driver.restore_log:
        driver.iterate()
    assert driver.restore_log[0] == small.id
    assert leader.state is State.RUNNING and big.state is State.PREEMPTED


def test_rotation_lets_the_head_in() -> None:
    """Without it the parked one waits until somebody ends."""
    driver = driver_of(512, num_slots=3, rotation_delay_ms=300.0)
    for n in (160, 120, 100):
        driver.submit([prompt(n, n)], None)
    for _ in range(150):
        driver.iterate()
    rotated = [id for id, reason, _, _ in driver.park_log if reason == "rotation"]
    assert len(rotated) >= 2 and len(set(rotated)) > 1, "the turns go round"
    assert len(rotated) <= 150 * driver.step_ms / 300.0, "one turn per delay"
    driver.run(4000)
    assert len(driver.finished) == 3


@pytest.mark.parametrize(("rotation_delay_ms", "copy_ms"), [(0.0, 5.0), (300.0, 400.0), (300.0, 100_000.0)])
@pytest.mark.parametrize("slow", [frozenset(), frozenset({Tier.RAM})])
def test_rotation_lets_everyone_advance_however_slow_it_is(
    rotation_delay_ms: float, copy_ms: float, slow: frozenset[Tier]
) -> None:
    """Where the engine awaits each copy nobody runs meanwhile, and the next in line waits for too long again; or all is
    computed again, chunk by chunk."""
    driver = driver_of(512, num_slots=3, batch_tokens=32, is_async=False, rotation_delay_ms=rotation_delay_ms)
    driver.copy_ms, driver.slow = copy_ms, slow
    for n in (160, 120, 100):
        driver.submit([prompt(n, n)], None)
    driver.run(4000)
    assert len(driver.finished) == 3
    advances: dict[int, list[int]] = {}
    for id, reason, _, num_generated in driver.park_log:
        if reason == "rotation":
            advances.setdefault(id, []).append(num_generated)
    assert advances, "somebody is rotated out"
    assert all(counts == sorted(set(counts)) for counts in advances.values()), "each time with more than the last"


def test_the_time_that_a_copy_takes_is_no_time_in_which_one_ran() -> None:
    """Copies land every 600 ms; who is back runs for 200 before it makes room for another."""
    driver = driver_of(512, num_slots=5, rotation_delay_ms=200.0)
    for number, prompt_len in enumerate((160, 80, 80, 80, 80)):
        driver.submit([prompt(prompt_len, number)], None)
    while len(driver.finished) < 5:
        driver.iterate(lambda ids: ids if driver.num_iterations % 60 == 0 or driver.finished else ())
    last: dict[int, int] = {}
    turns = []
    for id, reason, _, num_generated in driver.park_log:
        if reason == "rotation" and id in last:
            turns.append(num_generated - last[id])
        last[id] = num_generated
    assert turns and min(turns) >= 200.0 / driver.step_ms


def test_a_rotation_that_the_host_cannot_hold_is_refused_once_per_park() -> None:
    driver = driver_of(512, num_slots=3, host_pages=9, rotation_delay_ms=300.0)
    for n in (160, 120, 100):
        driver.submit([prompt(n, n)], 300)
    driver.run(4000)
    assert len(driver.finished) == 3
    refused = [plan.refused_rotation for plan in driver.plans if plan.refused_rotation is not None]
    assert 1 <= len(refused) <= len(driver.park_log)
    assert all(refused.count(each) <= each.num_parks for each in refused)


def test_waiting_requests_are_admitted_in_order_and_small_ones_may_pass() -> None:
    driver = driver_of(256, num_slots=3, rotation_delay_ms=50.0)
    driver.submit([prompt(100)], 60)
    driver.iterate()
    big = driver.submit([prompt(150, 1)], 20)[0]
    small = driver.submit([prompt(20, 2)], 20)[0]
    driver.iterate()
    assert big.state is State.WAITING and small.state is State.RUNNING
    for _ in range(6):
        driver.iterate()
    late = driver.submit([prompt(20, 3)], 20)[0]
    driver.iterate()
    assert late.state is State.WAITING, "nobody passes one that waited for too long"
    driver.run(500)
    assert len(driver.finished) == 4


def test_one_far_behind_in_the_queue_passes_all_that_do_not_fit() -> None:
    driver = driver_of(256, num_slots=3, rotation_delay_ms=1e9)
    driver.submit([prompt(100)], 60)
    driver.iterate()
    bigs = [driver.submit([prompt(150, n)], 20)[0] for n in range(1, 41)]
    small = driver.submit([prompt(20, 99)], 20)[0]
    driver.iterate()
    assert small.state is State.RUNNING and all(each.state is State.WAITING for each in bigs)
    driver.run(5000)
    assert [each.id for each in driver.finished if each in bigs] == [each.id for each in bigs], "in order among equals"


def order_of_ends(rotation_delay_ms: float, groups: list[list[list[int]]]) -> list[int]:
    """Ids, where one runs at a time, and a first one for 100 ms while all the others come."""
    driver = driver_of(2048, num_slots=1, batch_tokens=2048, rotation_delay_ms=rotation_delay_ms)
    driver.submit([prompt(10, 99)], 10)
    driver.iterate()
    for prompts in groups:
        driver.submit(prompts, 2, is_led=True)
    driver.run(500)
    return [each.id for each in driver.finished]


def test_a_long_prompt_lets_as_many_shorter_ones_pass_as_it_costs_places_and_no_more() -> None:
    """256 tokens cost a place: 600 let two pass that come later, however many shorter ones there are."""
    groups = [[prompt(600, 1)], *([prompt(10, n)] for n in range(2, 40))]
    assert order_of_ends(1e9, groups) == [0, 2, 3, 1, *range(4, 40)]


def test_nobody_passes_a_chat_for_what_the_prompt_cache_has_of_it() -> None:
    """Its next turn brings 600 tokens along and 20 new ones; who brings as many for the first time is passed."""
    driver = driver_of(4096, num_slots=1, batch_tokens=2048, rotation_delay_ms=1e9)
    first = driver.submit([prompt(600, 1)], 2)[0]
    driver.run(50)
    driver.submit([prompt(10, 99)], 10)
    driver.iterate()
    for tokens in (prompt(600, 2), [*first.tokens, *prompt(20, 3)], prompt(10, 4), prompt(10, 5)):
        driver.submit([tokens], 2)
    driver.run(500)
    assert [each.id for each in driver.finished] == [0, 1, 3, 4, 2, 5]
    assert driver.finished[2].num_cached >= 592


def test_what_the_prompt_cache_has_of_a_group_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk through all pages of a long prompt for each of the group held the loop up. Who heads it when the first has
    hung up is passed for none of them either.
    """
    driver = driver_of(4096, num_slots=1, batch_tokens=2048, rotation_delay_ms=1e9)
    driver.submit([prompt(600, 1)], 2)
    driver.run(50)
    driver.submit([prompt(10, 99)], 10)
    driver.iterate()
    lookups: list[list[int]] = []
    match = driver.ledger._view.cache.match

    def counted(tokens: list[int], max_pages: int, **options: bool) -> list[Node]:
        lookups.append(tokens)
        return match(tokens, max_pages, **options)

    with monkeypatch.context() as patched:
        patched.setattr(driver.ledger._view.cache, "match", counted)
        group = driver.submit([prompt(600, 1)] * 3, 2, is_led=True)
    assert len(lookups) == 1
    driver.cancel(group[0])
    driver.submit([prompt(10, 4)], 2)
    driver.run(500)
    assert [each.id for each in driver.finished] == [0, 1, 3, 4, 5]


def test_of_those_that_come_together_the_short_go_first() -> None:
    assert order_of_ends(1e9, [[prompt(len, len)] for len in (1900, 1200, 600, 10)]) == [0, 4, 3, 2, 1]


def test_nobody_passes_the_oldest_once_it_is_overdue() -> None:
    groups = [[prompt(600, 1)], *([prompt(10, n)] for n in range(2, 10))]
    assert order_of_ends(50.0, groups) == [*range(10)]


def test_a_shared_prompt_costs_those_no_place_that_do_not_compute_it() -> None:
    assert order_of_ends(1e9, [[prompt(600, 1)] * 3, [prompt(10, 2)], [prompt(10, 3)]]) == [0, 1, 2, 3, 4, 5]


def test_nobody_is_admitted_while_a_parked_one_waits() -> None:
    driver = driver_of(256, num_slots=3)
    driver.submit([prompt(120)], 100)
    small = driver.submit([prompt(80, 1)], 100)[0]
    until_parked(driver, small)
    driver.iterate()
    late = driver.submit([prompt(5, 2)], 5)[0]
    for _ in range(20):
        driver.iterate()
        assert not (small.state is State.PREEMPTED and late.state is State.RUNNING)
    driver.run(500)


def test_the_queue_is_bounded() -> None:
    driver = driver_of(256, num_slots=1, max_queue=2)
    for _ in range(3):
        driver.submit([prompt(10)], 5)
    with pytest.raises(Unavailable):
        driver.submit([prompt(10)], 5)
    driver.run(100)
    assert len(driver.finished) == 3


def test_prompt_chunks_run_beside_decode_rows_within_their_budget() -> None:
    driver = driver_of(512, batch_tokens=32)
    first = driver.submit([prompt(20)], 50)[0]
    driver.iterate()
    second = driver.submit([prompt(100, 1)], 5)[0]
    plan = driver.iterate()
    assert [(row.sequence, row.length, row.samples) for row in plan.rows] == [(first, 1, True), (second, 32, False)]
    driver.run(100)


def test_a_prompt_that_must_be_scored_takes_nothing_from_the_cache() -> None:
    driver = driver_of(512)
    driver.submit([prompt(100)], 5)
    driver.run(50)
    (again,) = driver.submit([prompt(100)], 5)
    (fresh,) = driver.submit([prompt(100)], 5, cache_prompt=False)
    driver.run(50)
    assert (again.num_cached, fresh.num_cached) == (96, 0)


def test_parked_cells_are_pages_of_the_host_budget() -> None:
    """A park beyond what the RAM tier takes drops the pages instead (R22)."""
    driver = driver_of(256, num_slots=2, host_pages=4)
    driver.submit([prompt(120)], 100)
    small = driver.submit([prompt(80, 1)], 100)[0]
    until_parked(driver, small)
    assert [(reason, tier) for _, reason, tier, _ in driver.park_log] == [("pool_full", Tier.RECOMPUTE)]
    assert small.state is State.PREEMPTED and not small.pages and small.num_computed == 0
    driver.run(500)


def test_limits_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        Limits(16, 0, 4)
    with pytest.raises(ValueError, match="preempt_every must not be negative"):
        Limits(16, 1, 4, preempt_every=-1)


def test_a_plan_changes_nothing() -> None:
    driver = Driver(Limits(16, 16, 3))
    driver.submit([prompt(100)], 50)
    for _ in range(3):
        plan = driver.ledger.plan(0.0, 100)
        assert driver.ledger.plan(0.0, 100) == plan
    driver.ledger.check_integrity()
    assert driver.ledger.free_pages == 16


def test_a_recomputation_does_not_cost_the_lead() -> None:
    """Else the one that must compute everything again would be the next victim, for ever."""
    driver = driver_of(512, num_slots=2, host_pages=0, batch_tokens=16, preempt_every=20)
    long = driver.submit([prompt(150)], 60, cache_prompt=False)[0]
    short = driver.submit([prompt(40, 1)], 300, cache_prompt=False)[0]
    for _ in range(100):
        driver.iterate()
        if long.num_parks and long.state is State.RUNNING:
            break
    assert 0 < long.num_computed < short.num_computed
    assert driver.ledger._view.leader() is long
