"""Every small world: three sequences on six pages, and whatever may happen in whatever order (R8, R12, R20).

From an empty ledger, each state is followed by every arrival, cancel, landing, failed copy and iteration that is
possible in it, to some depth. States that differ in nothing that matters to the planner are one. From each of them the
world must come to an end by itself once its copies land: everybody finishes, no page, slot or parked byte stays behind.
The driver checks each step on the way: rows that read their own history, conserved pages, a leader that is not parked.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pyserve.plan import Limits
from pyserve.sequence import Sequence, State
from tests.pure.pool_driver import Driver

CELLS = 6
ARRIVALS = (([0], 5), ([1, 2], 4), ([0, 3, 1], None))  # prompt, most tokens; the last fills the pool to its end
Action = tuple[str, int]
Key = tuple[object, ...]


@dataclass
class World:
    driver: Driver
    arrived: frozenset[int] = frozenset()

    def actions(self) -> Iterator[Action]:
        for kind in range(len(ARRIVALS)):
            if kind not in self.arrived:
                yield "arrive", kind
        for id in self.driver.in_flight():
            yield "land", id
            yield "fail", id
        for sequence in self.driver.ledger.live():
            yield "cancel", sequence.id
        if not self.driver.ledger.is_idle:
            yield "iterate", 0

    def do(self, action: Action) -> None:
        name, number = action
        driver = self.driver
        if name == "arrive":
            prompt, max_tokens = ARRIVALS[number]
            driver.submit([prompt], max_tokens)
            self.arrived |= {number}
        elif name == "cancel":
            driver.cancel(next(each for each in driver.ledger.live() if each.id == number))
        elif name == "iterate":
            driver.iterate(lambda ids: ids[:0])
        else:
            driver.land(number, is_failed=name == "fail")
        driver.ledger.check_integrity()
        driver.plans.clear()
        driver.park_log.clear()
        driver.restore_log.clear()

    def key(self) -> Key:
        """What the planner's decisions, now and later, can depend on; page numbers are exchangeable."""
        ledger = self.driver.ledger
        pool = ledger._view.pool
        order = tuple(each.id for each in [*ledger.running(), *ledger.waiting, *ledger.parked(), *ledger.departing()])
        return (
            self.arrived,
            order,
            tuple(map(self._key_of, [*ledger.live(), *ledger.departing()])),
            tuple(self.driver.in_flight()),
            tuple((id, *each.key()) for id, each in self.driver.restores_in_flight.items()),
            tuple(sorted(len(pages) for pages in self.driver.host.values())),
            (pool.num_free, pool.num_cached, pool.num_leaving, self.driver.is_waiting),
        )

    def _key_of(self, each: Sequence) -> Key:
        view = self.driver.ledger._view
        own = view.pool.num_own(each.pages) if each.state is not State.PREEMPTING else 0
        cached = len(view.cache.match(each.tokens, CELLS, with_filling=True))
        progress = (each.num_computed, len(each.tokens), each.progress)
        pages = (len(each.pages), own, cached, each.cache_node is not None)
        return (each.id, each.prompt_len, each.state, each.tier, each.slot, min(each.num_parks, 4), progress, pages)

    def come_to_an_end(self, known: set[Key]) -> None:
        """Every copy lands at once from now on. Stops in a state that is known to come to an end."""
        driver = self.driver
        passed = []
        for _ in range(200):
            key = self.key()
            if key in known or driver.ledger.is_idle:
                break
            passed.append(key)
            driver.land_all()
            driver.iterate(lambda ids: ids[:0])
        else:
            raise AssertionError(f"never ends: {driver.ledger.live()}")
        if driver.ledger.is_idle:
            driver.check_all_ended()
        known.update(passed)


def explore(limits: Limits, host_pages: int, depth: int) -> int:
    """Every world within `depth` actions. Returns how many there are."""
    start = World(Driver(limits, host_pages))
    level = {start.key(): pickle.dumps(start)}
    seen, known = set(level), set[Key]()
    for _ in range(depth):
        following: dict[Key, bytes] = {}
        for saved in level.values():
            for action in pickle.loads(saved).actions():
                world: World = pickle.loads(saved)
                world.do(action)
                key = world.key()
                if key in seen:
                    continue
                seen.add(key)
                following[key] = pickle.dumps(world)
                world.come_to_an_end(known)
        level = following
    return len(seen)


WORLDS: dict[str, tuple[int, dict[str, float]]] = {  # pages that the host takes, limits
    "ram": (100, {}),
    "little ram": (3, {}),
    "rotation": (100, {"rotation_delay_ms": 0.0}),
    "last resort": (100, {"is_planner_on": False}),
    "forced": (0, {"preempt_every": 2}),
    "synchronous": (100, {"is_async": False}),
    "pages of two": (100, {"page_size": 2, "num_pages": 3}),
}


def limits_of(changes: dict[str, float]) -> Limits:
    numbers = {"num_pages": CELLS, "page_size": 1, "num_slots": 3, "runway_steps": 0, "rotation_delay_ms": 1e9}
    return Limits(**(numbers | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORLDS)
def test_every_small_world_comes_to_an_end(name: str) -> None:
    """With tools/liveness_nightly.py the depth is as far as there is anything new: 15,105 worlds at most."""
    host_pages, changes = WORLDS[name]
    assert explore(limits_of(changes), host_pages, depth=7) > 300
