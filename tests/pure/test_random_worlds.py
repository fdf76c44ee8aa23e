"""Long seeded walks through worlds that are harsher than a state machine's short ones.

Few pages, many prefixes in common, copies that hang and fail, parks forced at every token: what the walks check is in
the driver, and that everybody ends, once, and never by pressure.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pyserve import planner
from pyserve.plan import Limits
from pyserve.sequence import Tier
from tests.pure.pool_driver import VOCABULARY, Driver


def random_driver(dice: random.Random) -> Driver:
    limits = Limits(
        num_pages=dice.randint(1, 20),
        page_size=dice.choice([1, 2, 4, 8]),
        num_slots=dice.randint(1, 6),
        batch_tokens=dice.choice([5, 32]),
        runway_steps=dice.choice([8, 8, 2, 0]),
        rotation_delay_ms=dice.choice([0.0, 30.0, 2000.0]),
        is_parking_on=dice.random() < 0.85,
        is_planner_on=dice.random() < 0.7,
        is_async=dice.random() < 0.7,
        preempt_every=dice.choice([0, 0, 1, 3, 8]),
    )
    return Driver(limits, host_pages=dice.choice([0, 3, 12, 1 << 20]), disk_pages=dice.choice([0, 0, 7, 1 << 20]))


def roomy_limits(dice: random.Random) -> Limits:
    return Limits(
        num_pages=dice.randint(20, 80),
        page_size=dice.choice([1, 2, 4]),
        num_slots=dice.randint(3, 8),
        batch_tokens=dice.choice([8, 512]),
        runway_steps=dice.choice([8, 2]),
        rotation_delay_ms=dice.choice([30.0, 2000.0]),
        is_async=dice.random() < 0.8,
    )


def submit_some(driver: Driver, dice: random.Random, base: list[int]) -> None:
    shared = base[: dice.randint(0, min(40, driver.limits.context_len))]
    tails = [[dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 8))] for _ in range(dice.randint(1, 4))]
    is_led = dice.random() < 0.5
    if is_led:
        tails = tails[:1] * len(tails)
    driver.submit(
        [shared + tail for tail in tails],
        dice.choice([None, 1, 5, 30]),
        is_led=is_led,
        cache_prompt=dice.random() < 0.9,
    )


def walk(driver: Driver, dice: random.Random) -> None:
    base = [dice.randrange(VOCABULARY) for _ in range(60)]
    hanging = dice.choice([0.0, 0.5, 0.9, 1.0])
    failing = dice.choice([0.0, 0.0, 0.2])
    arriving = dice.choice([0.05, 0.3])
    leaving = dice.choice([0.0, 0.02, 0.1])
    given_up = dice.choice([0.0, 0.0, 0.1])
    for _ in range(dice.choice([40, 150])):
        if dice.random() < arriving and len(driver.ledger.live()) < 12:
            submit_some(driver, dice, base)
        if dice.random() < leaving and driver.ledger.live():
            driver.cancel(dice.choice(driver.ledger.live()))
        in_flight = driver.in_flight()
        dice.shuffle(in_flight)
        for id in in_flight:
            if dice.random() >= hanging:
                driver.land(id, is_failed=dice.random() < failing)
            elif dice.random() < given_up:
                driver.give_up(id)
        for copy_id in [each for each in driver.overdue if dice.random() < 0.2]:
            driver.end_late(copy_id)
        if dice.random() < 0.1 and driver.movable():
            driver.move_to_disk(dice.choice(driver.movable()))
        if dice.random() < 0.05:
            driver.slow = dice.choice([frozenset(), frozenset({Tier.DISK}), frozenset({Tier.RAM, Tier.DISK})])
        driver.iterate(lambda ids: ids[:0])


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_everybody_ends_once_and_never_by_pressure(first_seed: int) -> None:
    num_iterations = 0
    for seed in range(first_seed, first_seed + 25):
        dice = random.Random(seed)
        driver = random_driver(dice)
        walk(driver, dice)
        driver.run(driver.patience())
        driver.check_all_ended()
        num_iterations += driver.num_iterations
    assert num_iterations > 2000


def walk_in_groups(driver: Driver, dice: random.Random) -> None:
    """Groups come, are parked all at once, are forgotten by the prompt cache, and come back; much goes wrong then."""
    base = [dice.randrange(VOCABULARY) for _ in range(60)]
    for _ in range(8):
        submit_some(driver, dice, base)
        for _ in range(dice.randint(1, 8)):
            driver.iterate()
        driver.park_all()
        driver.land_all()
        driver.crowd_out()
        for _ in range(dice.randint(1, 6)):
            driver.iterate(lambda ids: ids[:0])
            if in_flight := driver.in_flight():
                driver.land(dice.choice(in_flight), is_failed=dice.random() < 0.3)
            if dice.random() < 0.1 and driver.ledger.live():
                driver.cancel(dice.choice(driver.ledger.live()))


def test_groups_share_what_comes_back_before_it_is_there() -> None:
    num_adopted = num_forsaken = 0
    for seed in range(100):
        dice = random.Random(seed)
        driver = Driver(roomy_limits(dice), host_pages=dice.choice([30, 1 << 20, 1 << 20]))
        walk_in_groups(driver, dice)
        driver.run(driver.patience())
        driver.check_all_ended()
        num_adopted += driver.num_adopted
        num_forsaken += driver.num_forsaken
    assert num_adopted > 300 and num_forsaken > 50


def test_groups_wait_for_what_one_of_them_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short, so what is worth waiting for is, too."""
    num_waits = 0
    is_being_computed = planner._Draft._is_being_computed

    def counted(*args: Any) -> bool:
        nonlocal num_waits
        found = is_being_computed(*args)
        num_waits += found
        return found

    monkeypatch.setattr(planner._Draft, "_is_being_computed", counted)
    for seed in range(60):
        dice = random.Random(seed)
        monkeypatch.setattr(planner, "WORTH_SHARING", dice.choice([1, 4, 12]))
        driver = random_driver(dice) if seed % 2 else Driver(roomy_limits(dice), host_pages=dice.choice([0, 10]))
        walk_in_groups(driver, dice)
        driver.run(driver.patience())
        driver.check_all_ended()
    assert num_waits > 200
