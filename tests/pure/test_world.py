"""The ledger as a state machine: whatever arrives, leaves, lands late or fails, nothing is lost and all ends (R12).

After every iteration the driver checks that pages are conserved, that every row reads its own history, that the leader
was not parked and that something moves. When a world closes, everybody in it must finish in a bounded time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pyserve.plan import Limits
from pyserve.sequence import Tier
from tests.pure.pool_driver import VOCABULARY, Driver

tokens = st.integers(0, VOCABULARY - 1)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Limits(
        num_pages=draw(st.integers(1, 20)),
        page_size=page_size,
        num_slots=draw(st.integers(1, 5)),
        batch_tokens=draw(st.sampled_from([5, 32])),
        runway_steps=draw(st.sampled_from([8, 8, 2])),
        rotation_delay_ms=draw(st.sampled_from([0.0, 30.0, 2000.0])),
        is_parking_on=draw(st.sampled_from([True, True, True, False])),
        is_planner_on=draw(st.sampled_from([True, True, False])),
        is_async=draw(st.booleans()),
        preempt_every=draw(st.sampled_from([0, 0, 1, 3, 8])),
    )


class World(RuleBasedStateMachine):
    """Arrivals, cancels, landings and iterations in any order."""

    def __init__(self, ended: list[Driver]) -> None:
        super().__init__()
        self.ended = ended

    @initialize(
        limits=limits(),
        host_pages=st.sampled_from([12, 1 << 20, 3, 0]),
        disk_pages=st.sampled_from([7, 1 << 20, 0]),
        base=st.lists(tokens, min_size=40),
        num_shared=st.integers(0, 12),
    )
    def open(self, limits: Limits, host_pages: int, disk_pages: int, base: list[int], num_shared: int) -> None:
        """Somebody is there already."""
        self.driver = Driver(limits, host_pages, disk_pages)
        self.base = base  # what the prompts of this world have in common
        self.driver.submit([[*base[:num_shared], number] for number in range(3)], 30)
        for _ in range(3):
            self.driver.iterate()

    @rule(
        num_shared=st.integers(0, 40),
        tails=st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=3),
        max_tokens=st.one_of(st.integers(1, 40), st.none()),
        is_same=st.booleans(),
        cache_prompt=st.sampled_from([True, True, False]),
    )
    def submit(
        self, num_shared: int, tails: list[list[int]], max_tokens: int | None, is_same: bool, cache_prompt: bool
    ) -> None:
        if is_same:  # n > 1: one prompt, several continuations
            tails = [tails[0]] * len(tails)
        prompts = [self.base[:num_shared] + tail for tail in tails]
        self.driver.submit(prompts, max_tokens, is_led=is_same, cache_prompt=cache_prompt)

    @precondition(lambda self: self.driver.ledger.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(self.driver.ledger.live())))

    @precondition(lambda self: self.driver.ledger.running() and self.driver.limits.is_parking_on)
    @rule(copies=st.sampled_from(["land", "are given up", "go on"]))
    def park_all(self, copies: str) -> None:
        """As many as the tiers take, and what the prompt cache knows of them is needed for others."""
        driver = self.driver
        driver.park_all()
        if copies == "land":
            driver.land_all()
        for id in driver.in_flight() if copies == "are given up" else ():
            driver.give_up(id)
        driver.crowd_out()

    @rule(count=st.integers(1, 12))
    def iterate(self, count: int) -> None:
        """Every copy lands before the next iteration."""
        for _ in range(count):
            self.driver.iterate()

    @rule(count=st.integers(1, 12), are_given_up=st.sampled_from([False, False, True]))
    def iterate_while_copies_hang(self, count: int, are_given_up: bool) -> None:
        """They may not be done in their time, and end much later."""
        for _ in range(count):
            self.driver.iterate(lambda ids: ids[:0])
        for id in self.driver.in_flight() if are_given_up else ():
            self.driver.give_up(id)

    @precondition(lambda self: self.driver.in_flight())
    @rule(data=st.data())
    def land_one(self, data: st.DataObject) -> None:
        """In any order."""
        self.driver.land(data.draw(st.sampled_from(self.driver.in_flight())))

    @precondition(lambda self: self.driver.in_flight())
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        self.driver.land(data.draw(st.sampled_from(self.driver.in_flight())), is_failed=True)

    @precondition(lambda self: self.driver.overdue)
    @rule(data=st.data())
    def end_one_late(self, data: st.DataObject) -> None:
        self.driver.end_late(data.draw(st.sampled_from(sorted(self.driver.overdue))))

    @precondition(lambda self: self.driver.movable())
    @rule(data=st.data())
    def move_one_to_disk(self, data: st.DataObject) -> None:
        self.driver.move_to_disk(data.draw(st.sampled_from(self.driver.movable())))

    @rule(slow=st.sampled_from([frozenset(), frozenset({Tier.DISK}), frozenset({Tier.RAM, Tier.DISK})]))
    def measure_tiers(self, slow: frozenset[Tier]) -> None:
        """Which of them are not worth their copies any more."""
        self.driver.slow = slow

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run(driver.patience())
        driver.check_all_ended()
        self.ended.append(driver)


def test_nothing_is_lost_in_ten_thousand_steps() -> None:
    ended: list[Driver] = []
    run_state_machine_as_test(
        lambda: World(ended),
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert sum(driver.num_iterations for driver in ended) >= 10_000
    assert sum(driver.num_given_up for driver in ended) > 5
    assert any(tier is Tier.DISK for driver in ended for *_, tier, _ in driver.park_log)
