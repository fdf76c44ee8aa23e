"""Restore or compute again, by what was measured (R23)."""

from __future__ import annotations

import pytest

from pyserve.plan import Limits
from pyserve.rates import Rates
from pyserve.sequence import State, Tier
from pyserve.view import Room
from tests.pure.pool_driver import Driver
from tests.pure.test_tiers import computed

MIB = 1 << 20


def measured(disk_mib_per_s: float, prompt_tokens_per_s: float) -> Rates:
    """A page has 1 MiB and 16 tokens."""
    rates = Rates(MIB, 16)
    rates.prompt.add(2000, 2000 / prompt_tokens_per_s, 0.0)
    rates.restore[Tier.DISK].add(100 * MIB, 100 / disk_mib_per_s, 0.0)
    return rates


@pytest.mark.parametrize(
    ("disk_mib_per_s", "prompt_tokens_per_s", "slow"),
    [
        (100, 1000, frozenset()),  # 10 ms a page against 16
        (100, 2000, frozenset()),  # 10 against 8: not by enough
        (100, 3000, frozenset({Tier.DISK})),  # 10 against 5.3
        (10, 1000, frozenset({Tier.DISK})),
    ],
)
def test_the_quicker_way_is_taken(disk_mib_per_s: float, prompt_tokens_per_s: float, slow: frozenset[Tier]) -> None:
    assert measured(disk_mib_per_s, prompt_tokens_per_s).slow_tiers(1.0) == slow


def test_nothing_is_said_before_enough_is_measured_or_long_after() -> None:
    rates = Rates(MIB, 16)
    rates.restore[Tier.DISK].add(20 * MIB, 100.0, 0.0)
    assert rates.slow_tiers(0.0) == frozenset(), "no prompt was measured"
    rates.prompt.add(999, 0.1, 0.0)
    assert rates.slow_tiers(0.0) == frozenset(), "too few tokens"
    rates.prompt.add(999, 0.1, 0.0)
    assert rates.slow_tiers(0.0) == frozenset({Tier.DISK})
    assert rates.slow_tiers(61.0) == frozenset(), "old figures"
    rates.restore[Tier.RAM].add(MIB, 100.0, 0.0)
    assert rates.slow_tiers(0.0) == frozenset({Tier.DISK}), "one small copy says nothing about memory"


def test_new_measurements_outweigh_old_ones() -> None:
    rates = measured(10, 1000)
    assert rates.slow_tiers(1.0) == frozenset({Tier.DISK})
    for _ in range(20):
        rates.restore[Tier.DISK].add(100 * MIB, 0.1, 1.0)
    assert rates.slow_tiers(1.0) == frozenset()


def test_a_slow_tier_is_not_parked_in() -> None:
    room = Room(4, ram_pages=2, disk_pages=100, slow=frozenset({Tier.DISK}))
    assert room.tier_of(computed(8)) == (Tier.RAM, 2)
    assert room.tier_of(computed(12)) == (Tier.RECOMPUTE, 0)
    assert room.can_hold([computed(12), computed(12)]), "computing again is no loss"


def test_what_is_parked_in_a_tier_that_became_slow_is_computed_again() -> None:
    driver = Driver(Limits(num_pages=16, page_size=4, num_slots=2, preempt_every=4))
    for seed in range(2):
        driver.submit([[seed, 1, 2, 3, 4, 5]], 20, cache_prompt=False)
    ledger = driver.ledger
    while not ledger.num_parked:
        driver.iterate(landing=lambda ids: [])
    for id in driver.in_flight():
        driver.land(id)
    parked = ledger.parked()
    assert all(each.tier is Tier.RAM and each.parked_cells for each in parked)
    plan = ledger.apply(ledger.plan(driver.now_ms, 100, 0, frozenset({Tier.RAM})), driver.now_ms)
    assert [restore.tier for restore in plan.restores] == [Tier.RECOMPUTE] * len(parked)
    ledger.check_integrity()
    for sequence in parked:
        assert (sequence.state, sequence.num_computed, sequence.parked_cells) == (State.RUNNING, 0, 0)
        (row,) = [row for row in plan.rows if row.sequence is sequence]
        assert (row.start, row.length) == (0, len(sequence.tokens))
