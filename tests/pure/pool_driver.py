"""An engine without a model, for tests: it drives the real ledger, and its store knows what every cell must hold.

A cell's content is a fingerprint of all tokens up to its position. A row checks every cell that it reads, so a page
that is reused while a copy still needs it, shared wrongly or restored wrongly fails the test at the step that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from pyserve.ledger import Ledger
from pyserve.plan import Limits, Park, Plan, Restore, Row, Rows
from pyserve.prefix import num_common_pages
from pyserve.sequence import Sequence, State, Tier
from pyserve.types import SamplingParams, SequenceRequest
from pyserve.view import Room
from tests.pure.flights import Incoming, Overdue

VOCABULARY = 5


def next_token(tokens: list[int]) -> int:
    """What the pretended model says: a function of the position and the last tokens."""
    return hash((len(tokens), *tokens[-4:])) % VOCABULARY


@dataclass
class Driver:
    """Submit, then call `iterate` until `ledger.is_idle`. `host_pages` and `disk_pages` bound the tiers."""

    limits: Limits
    host_pages: int = 1 << 30
    disk_pages: int = 0
    slow: frozenset[Tier] = frozenset()  # tiers that are not worth their copies at the moment
    step_ms: float = 10.0
    copy_ms: float = 0.0  # for which the copies of one plan hold up an engine that awaits them
    now_ms: float = 0.0
    is_checked: bool = True  # check_integrity after every iteration
    num_steps: int = 0  # iterations that ran rows
    num_iterations: int = 0
    num_idle: int = 0  # iterations in a row without rows, while nothing was in flight
    is_waiting: bool = False  # for a copy: the next iteration begins when one lands
    next_id: int = 0
    kv: dict[int, list[int | None]] = field(default_factory=dict)  # page -> fingerprint of each cell
    host: dict[int, list[list[int | None]]] = field(default_factory=dict)  # sequence id -> parked pages, in any tier
    on_disk: set[int] = field(default_factory=set)  # ids of those whose parked pages are, or will be, there
    overdue: dict[int, Overdue] = field(default_factory=dict)  # by copy id
    parks_in_flight: dict[int, tuple[Sequence, list[list[int | None]]]] = field(default_factory=dict)
    restores_in_flight: dict[int, Incoming] = field(default_factory=dict)
    num_adopted: int = 0  # restores that shared pages which another was filling
    num_given_up: int = 0  # copies
    num_forsaken: int = 0  # those of them whose pages were not filled
    are_forsaken_kept: bool = True  # their own parked state is good
    marks: dict[int, list[int]] = field(default_factory=dict)  # sequence id -> fingerprint of each position
    finished: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    cancelled: list[Sequence] = field(default_factory=list)
    park_log: list[tuple[int, str, Tier, int]] = field(default_factory=list)  # (id, reason, tier, generated)
    restore_log: list[int] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.limits)

    # Arrivals and ends

    def submit(
        self, prompts: Iterable[list[int]], max_tokens: int | None, *, is_led: bool = False, cache_prompt: bool = True
    ) -> list[Sequence]:
        """One request. `is_led`: all wait for the first to compute the prompt."""
        group = []
        first_id = self.next_id
        for index, prompt in enumerate(prompts):
            request = SequenceRequest(tuple(prompt), SamplingParams(), max_tokens, cache_prompt=cache_prompt)
            leader = first_id if is_led and index else None
            group.append(Sequence(self.next_id, request, first_id, index, prompt_leader=leader))
            self.next_id += 1
        self.ledger.submit(group)
        return group

    def cancel(self, sequence: Sequence) -> None:
        if sequence.state is not State.FINISHED:
            self.cancelled.append(sequence)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        is_free = self.ledger.finish(sequence, self.now_ms)
        is_in_flight = sequence.id in self.parks_in_flight or sequence.id in self.restores_in_flight
        assert is_free != is_in_flight, f"{sequence}: freed {is_free} with a copy in flight {is_in_flight}"
        if is_free:
            self._drop(sequence.id)

    # Copies

    def num_used(self, tier: Tier) -> int:
        """Pages that are parked there, or on their way."""
        states = [*self.host.items(), *((id, content) for id, (_, content) in self.parks_in_flight.items())]
        return sum(len(content) for id, content in states if (id in self.on_disk) == (tier is Tier.DISK))

    def _drop(self, id: int) -> None:
        self.host.pop(id, None)
        self.on_disk.discard(id)

    def in_flight(self) -> list[int]:
        """Those that can land now: a restore does after those whose pages it shares."""
        restores = self.restores_in_flight
        return [*self.parks_in_flight, *(id for id in restores if not restores[id].behind & restores.keys())]

    def land(self, id: int, *, is_failed: bool = False) -> None:
        """One copy lands, or fails."""
        if id in self.parks_in_flight:
            self._land_park(id, is_failed)
        else:
            self._land_restore(id, is_failed)

    def _land_park(self, id: int, is_failed: bool) -> None:
        sequence, content = self.parks_in_flight.pop(id)
        now_there = [list(self.kv[page]) for page in sequence.pages[: len(content)]]
        # Cells beyond the computed ones may be anything; these must be as they were when the copy began.
        assert now_there == content, f"a page of {sequence} was written while its copy was in flight"
        self.host[id] = content
        if is_failed:
            self.ledger.park_failed(sequence)
        else:
            self.ledger.park_landed(sequence)
        if is_failed or sequence.state is State.FINISHED:
            self._drop(id)

    def _land_restore(self, id: int, is_failed: bool) -> None:
        restore = self.restores_in_flight.pop(id)
        sequence, content, tier = restore.sequence, self.host.pop(id), Tier.DISK if id in self.on_disk else Tier.RAM
        for page, cells in zip(restore.pages, content[restore.num_shared :], strict=False):
            self.kv[page] = [None] * self.limits.page_size if is_failed else list(cells)
        sharers = self._pop_sharers(id)
        if is_failed or restore.is_forsaken:
            for other in sharers:
                other.is_forsaken = True
            is_kept = self.are_forsaken_kept and not (is_failed or restore.is_lost)
            is_kept = is_kept and sequence.state is State.RESTORING
            self.ledger.restore_failed(sequence, tier if is_kept else None)
            if is_kept:
                self.host[id] = content
                self.num_forsaken += 1
                return
            self.num_forsaken += restore.is_forsaken
        else:
            self.ledger.restore_landed(sequence)
        self.on_disk.discard(id)

    def _pop_sharers(self, id: int) -> list[Incoming]:
        """Those in flight behind this copy, which is over. Whose it was may come back once more before they land."""
        sharers = [other for other in self.restores_in_flight.values() if id in other.behind]
        for other in sharers:
            other.behind.discard(id)
        return sharers

    def give_up(self, id: int) -> None:
        """A copy is not done in its time: nobody waits for it any more."""
        copy_id = self.num_given_up = self.num_given_up + 1
        if id in self.parks_in_flight:
            sequence, content = self.parks_in_flight.pop(id)
            self.overdue[copy_id] = Overdue(sequence.pages[: len(content)], content)
        else:
            restore = self.restores_in_flight.pop(id)
            sequence = restore.sequence
            self.overdue[copy_id] = Overdue(restore.pages)
            for other in self._pop_sharers(id):
                other.is_forsaken = other.is_lost = True
        self._drop(id)
        self.ledger.copy_overdue(sequence, copy_id, self.now_ms)

    def end_late(self, copy_id: int) -> None:
        """It has ended after all; until then it may have read its pages, or written to them."""
        copy = self.overdue.pop(copy_id)
        unknown: list[list[int | None]] = [[None] * self.limits.page_size for _ in copy.pages]
        for page, cells in zip(copy.pages, copy.content or unknown, strict=True):
            assert copy.content is None or self.kv[page] == cells, "a page was written while an overdue copy read it"
            self.kv[page] = list(cells)
        self.ledger.overdue_landed(copy_id)

    def movable(self) -> list[Sequence]:
        """Those in memory that the disk has room for."""
        room = self.disk_pages - self.num_used(Tier.DISK)
        in_memory = [each for each in self.ledger.parked() if each.tier is Tier.RAM]
        return [each for each in in_memory if len(self.host[each.id]) <= room]

    def move_to_disk(self, sequence: Sequence) -> None:
        self.on_disk.add(sequence.id)
        self.ledger.moved_to_disk(sequence)

    def land_all(self) -> None:
        while ids := self.in_flight():
            self.land(ids[0])
        for copy_id in list(self.overdue):
            self.end_late(copy_id)

    # One iteration

    def iterate(self, landing: Callable[[list[int]], Iterable[int]] | None = None) -> Plan:
        """Lands all copies, or those that `landing` picks; plans, applies, runs the step. Returns the applied plan."""
        if self.is_waiting and self.in_flight():
            self.land(self.in_flight()[0])
        elif self.is_waiting and self.overdue:
            self.end_late(next(iter(self.overdue)))
        if landing is None:
            self.land_all()
        for id in list(landing(self.in_flight())) if landing is not None else ():
            self.land(id)
        plan = self._plan()
        num_plans = 0
        while not self.limits.is_async and (plan.parks or plan.restores):
            num_plans += 1
            assert num_plans < 1000, f"plan follows plan, and none is followed by a step: {self.ledger.live()}"
            self.now_ms += self.copy_ms
            self.land_all()
            plan = self._plan()
        self.num_iterations += 1
        self._check_liveness(plan)
        self._step(plan.rows)
        self.is_waiting = plan.must_wait_for_copy
        assert not self.is_waiting or self.in_flight() or self.overdue, "waits for a copy, and none is in flight"
        self.now_ms += self.step_ms
        if self.is_checked:
            self.ledger.check_integrity()
        return plan

    def patience(self) -> int:
        """Iterations in which everybody here must have ended: a generous few for each token that anybody may have, and
        at worst, with parks forced at every token and no tier that keeps anything, all chunks again for each.
        """
        chunks = self.limits.context_len // self.limits.batch_tokens
        num_tokens = sum(self.limits.context_len + len(each.tokens) for each in self.ledger.live())
        return (20 + chunks) * num_tokens + 50

    def run(self, max_iterations: int) -> None:
        """Until everybody ended; fails when that takes too long."""
        for _ in range(max_iterations):
            if self.ledger.is_idle:
                return
            self.iterate()
        raise AssertionError(f"still busy after {max_iterations} iterations: {self.ledger.live()}")

    def check_all_ended(self) -> None:
        """Everybody ended exactly once, by pressure only where parking is off, and nothing is held any more."""
        ended = [*self.finished, *self.cancelled, *(sequence for sequence, _ in self.failed)]
        assert sorted(each.id for each in ended) == list(range(self.next_id)), "a sequence is lost, or ended twice"
        for sequence, reason in self.failed:
            is_too_long = sequence.prompt_len > self.limits.context_len
            assert (reason == "never_fits") == is_too_long, f"{sequence} failed: {reason}"
            assert is_too_long or not self.limits.is_parking_on, f"pressure ended {sequence}"
        assert not self.host and not self.on_disk, "parked memory stays held"
        assert self.ledger.free_pages + self.ledger.cached_pages == self.limits.num_pages

    def plan(self) -> Plan:
        """What the ledger would do now."""
        room, disk_room = self.host_pages - self.num_used(Tier.RAM), self.disk_pages - self.num_used(Tier.DISK)
        return self.ledger.plan(self.now_ms, max(0, room), max(0, disk_room), self.slow)

    def _plan(self) -> Plan:
        return self.carry_out(self.plan())

    def park_all(self) -> None:
        """Whoever runs, as if it were asked for, as far as the tiers take them."""
        room = Room(
            self.limits.page_size,
            self.host_pages - self.num_used(Tier.RAM),
            self.disk_pages - self.num_used(Tier.DISK),
            self.slow,
        )
        parks = []
        for sequence in self.ledger.running():
            tier, _ = room.tier_of(sequence)
            room.use(tier, sequence)
            parks.append(Park(sequence, "forced", tier))
        self.carry_out(Plan(parks=tuple(parks)))

    def crowd_out(self) -> None:
        """All that only the prompt cache holds goes: the pages are needed for others."""
        if self.ledger.cached_pages:
            self.ledger._view.cache.evict(self.ledger.cached_pages)

    def carry_out(self, plan: Plan) -> Plan:
        """Applies a plan and begins its copies."""
        leader, planned_rows = self.ledger._view.leader(), set(plan.rows)
        plan = self.ledger.apply(plan, self.now_ms)
        assert planned_rows.issuperset(plan.rows), "the last resort takes a row whole or not at all"
        self.plans.append(plan)
        for failure in plan.failures:
            self.failed.append((failure.sequence, failure.reason))
            assert failure.sequence.state is State.FINISHED
        for park in plan.parks:
            sequence = park.sequence
            if park.reason != "forced":
                assert sequence is not leader, f"the leader was parked: {sequence}"
            self.park_log.append((sequence.id, park.reason, park.tier, sequence.num_generated))
            if park.tier.is_copy:
                num_copied = -(-sequence.num_computed // self.limits.page_size)
                assert num_copied, "a copy of no page"
                content = [list(self.kv[page]) for page in sequence.pages[:num_copied]]
                self.parks_in_flight[sequence.id] = (sequence, content)
                if park.tier is Tier.DISK:
                    self.on_disk.add(sequence.id)
        assert self.num_used(Tier.RAM) <= self.host_pages and self.num_used(Tier.DISK) <= self.disk_pages
        for restore in plan.restores:
            self.restore_log.append(restore.sequence.id)
            if restore.tier.is_copy:
                self._start_restore(restore)
            else:
                self._drop(restore.sequence.id)
        self._check_sharing(plan)
        return plan

    def _start_restore(self, restore: Restore) -> None:
        sequence, num_shared = restore.sequence, restore.cached_pages
        shared = set(sequence.pages[:num_shared])
        behind = {id for id, other in self.restores_in_flight.items() if shared.intersection(other.pages)}
        if num_shared == len(self.host[sequence.id]) and not behind:
            self._drop(sequence.id)
            self.ledger.restore_landed(sequence)
            return
        pages = sequence.pages[num_shared:]
        self.restores_in_flight[sequence.id] = Incoming(sequence, num_shared, pages, behind)
        self.num_adopted += bool(behind)
        for page in pages[: len(self.host[sequence.id]) - num_shared]:
            self.kv[page] = [None] * self.limits.page_size  # a copy may write anything before it lands

    def _check_sharing(self, plan: Plan) -> None:
        """Those in restore hold the pages that they have in common once (R11)."""
        size = self.limits.page_size
        may_share = [
            each.sequence
            for each in self.restores_in_flight.values()
            if each.sequence.state is State.RESTORING and not each.is_forsaken and each.sequence.request.cache_prompt
        ]
        come_now = {restore.sequence.id for restore in plan.restores}
        for one, other in combinations(may_share, 2):
            if one.id in come_now or other.id in come_now:
                limit = min(one.num_computed, other.num_computed) // size
                num_common = num_common_pages(one.tokens, other.tokens, size, limit)
                assert one.pages[:num_common] == other.pages[:num_common], f"{one} and {other} have copies of a page"

    def _check_liveness(self, plan: Plan) -> None:
        if plan.rows or self.in_flight() or self.overdue or self.ledger.is_idle or plan.failures:
            self.num_idle = 0
            return
        assert not plan.must_wait_for_copy, "waits for a copy, and none is in flight"
        self.num_idle += 1
        assert self.num_idle < 3, f"nothing moves: {self.ledger.live()}"

    def _step(self, rows: Rows) -> None:
        assert len({row.sequence.id for row in rows}) == len(rows), "a sequence has two rows"
        chunks = [row.length for row in rows if row.sequence.num_pending > 1]
        assert sum(chunks) <= self.limits.batch_tokens, "more prompt tokens than a step takes"
        picked = []
        for row in rows:
            self._compute(row)
            if row.samples:
                picked.append(next_token(row.sequence.tokens))
        if rows:
            self.num_steps += 1
        self.ledger.step_done(rows, picked)
        for row in rows:
            self._end_at_length(row.sequence)

    def _compute(self, row: Row) -> None:
        sequence, size = row.sequence, self.limits.page_size
        assert sequence.state is State.RUNNING and row.start == sequence.num_computed and row.length > 0
        end = row.start + row.length
        assert row.samples == (end == len(sequence.tokens))
        assert len(sequence.pages) * size >= end, f"{sequence} has no page for position {end - 1}"
        marks = self._marks(sequence)
        for position in range(row.start):
            held = self.kv[sequence.pages[position // size]][position % size]
            assert held == marks[position], f"{sequence} reads a wrong cell at {position}"
        for position in range(row.start, end):
            page = sequence.pages[position // size]
            assert self.ledger._view.pool.holders[page] == 1, f"{sequence} writes a page that others use"
            assert not self.ledger._view.pool.readers[page], f"{sequence} writes a page that a copy reads"
            self.kv.setdefault(page, [None] * size)[position % size] = marks[position]

    def _marks(self, sequence: Sequence) -> list[int]:
        """What the cell of each position must hold: a fingerprint of all tokens up to it."""
        marks = self.marks.setdefault(sequence.id, [])
        for token in sequence.tokens[len(marks) :]:
            marks.append(hash((marks[-1] if marks else 0, token)))
        return marks

    def _end_at_length(self, sequence: Sequence) -> None:
        request = sequence.request
        is_long = request.max_tokens is not None and sequence.num_generated >= request.max_tokens
        if is_long or len(sequence.tokens) > self.limits.context_len:
            self._end(sequence)
            self.finished.append(sequence)
            tokens = list(request.prompt)
            while len(tokens) < len(sequence.tokens):
                tokens.append(next_token(tokens))
            assert tokens == sequence.tokens, f"{sequence} said something else than alone"
