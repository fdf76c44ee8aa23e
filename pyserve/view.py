"""The view: everything that the planner reads. The ledger keeps it up to date, and nobody else changes it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pyserve.calm import Calm, standing
from pyserve.decoding import Decoding
from pyserve.plan import Limits, Plan
from pyserve.policy import Policy
from pyserve.pool import Pool
from pyserve.prefix import PrefixCache
from pyserve.sequence import Sequence, Tier

_LEAST_UNITS = 16  # in the pool for each slot; where there are fewer, debts are counted in parts of blocks


class SparedPages(Protocol):
    """How many pages memory spares parks, one after the other, since others have them there (R11)."""

    def num_spared(self, sequence: Sequence) -> int:
        """A park of it, if it came now."""

    def park(self, sequence: Sequence) -> int:
        """The same, and it is parked from now on."""

    def copy(self) -> SparedPages: ...


@dataclass(slots=True)
class Room:
    """Pages that the tiers could still take (R22, R23). `slow`: tiers from which a page comes back more slowly than it
    is computed again. `open_outlook`: how many pages of these parks memory has, or will have by then; asked only when
    there is no room for all of them.
    """

    page_size: int
    ram_pages: int
    disk_pages: int = 0
    slow: frozenset[Tier] = frozenset()
    open_outlook: Callable[[], SparedPages] | None = None
    _outlook: SparedPages | None = None
    _uncounted: list[Sequence] = field(default_factory=list)  # in memory, and not yet spared anything

    def copy(self) -> Room:
        outlook = None if self._outlook is None else self._outlook.copy()
        return replace(self, _outlook=outlook, _uncounted=[*self._uncounted])

    def tier_of(self, sequence: Sequence) -> tuple[Tier, int]:
        """The tier that takes it, best first, and the pages it takes there. Nothing computed is nothing to copy."""
        num_pages = self._num_pages(sequence)
        is_room = num_pages <= self.ram_pages
        if num_pages and Tier.RAM not in self.slow and (is_room or self._is_room_exactly(sequence)):
            return Tier.RAM, num_pages
        if 0 < num_pages <= self.disk_pages and Tier.DISK not in self.slow:
            return Tier.DISK, num_pages
        return Tier.RECOMPUTE, 0

    def use(self, tier: Tier, sequence: Sequence) -> None:
        """It is parked there."""
        if tier is Tier.RAM:
            self.ram_pages -= self._num_pages(sequence)
            self._uncounted.append(sequence)
        elif tier is Tier.DISK:
            self.disk_pages -= self._num_pages(sequence)

    def _num_pages(self, sequence: Sequence) -> int:
        return -(-sequence.num_computed // self.page_size)

    def _is_room_exactly(self, sequence: Sequence) -> bool:
        if self.open_outlook is None:
            return False
        if self._outlook is None:
            self._outlook = self.open_outlook()
        self.ram_pages += sum(map(self._outlook.park, self._uncounted))
        self._uncounted.clear()
        return self._num_pages(sequence) - self._outlook.num_spared(sequence) <= self.ram_pages

    def can_hold(self, sequences: list[Sequence]) -> bool:
        """Whether none of them would have to be computed again for lack of room."""
        if self.slow:
            return True
        room = self.copy()
        for sequence in sequences:
            tier, _ = room.tier_of(sequence)
            if sequence.num_computed and not tier.is_copy:
                return False
            room.use(tier, sequence)
        return True


@dataclass(slots=True)
class View:
    """Everything that the planner may read. Dictionaries by sequence id, in the order of arrival there."""

    limits: Limits
    pool: Pool
    cache: PrefixCache
    policy: Policy = field(default_factory=Policy)
    live: dict[int, Sequence] = field(default_factory=dict)  # submitted and not ended
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)
    decoding: Decoding = field(default_factory=Decoding)  # running ones that have one token to compute
    short: dict[int, Sequence] = field(default_factory=dict)  # running ones without a page for their last token
    forced: dict[int, Sequence] = field(default_factory=dict)  # running ones that are to be parked whatever the room
    preempting: dict[int, Sequence] = field(default_factory=dict)
    parked: dict[int, Sequence] = field(default_factory=dict)
    restoring: dict[int, Sequence] = field(default_factory=dict)
    departing: dict[int, Sequence] = field(default_factory=dict)  # ended, a copy still in flight
    overdue: dict[int, list[int]] = field(default_factory=dict)  # pages of copies that nobody waits for, by copy id
    oversized: dict[int, Sequence] = field(default_factory=dict)  # more tokens than the whole pool holds
    free_slots: list[int] = field(default_factory=list)
    pressure_runway: int = field(init=False)  # cells kept clear per sequence
    rotation_head: Sequence | None = None  # parked, and room was made for it
    calm: Calm | None = None  # since the latest plan
    debt: int = 0  # the sum of the running sequences' debts
    entry_debt: int = 0  # and of their entry debts
    entry_runway: int = field(init=False)  # cells that are clear per sequence when one enters
    _unit_len: int = field(init=False)  # pages; what is kept clear is counted in so many
    _unit_cells: int = field(init=False)
    _count_gaps: tuple[int, ...] = field(init=False)  # by the number of tokens modulo the page size

    def __post_init__(self) -> None:
        limits = self.limits
        # Where a park lands at once nothing has to be clear ahead of it, but for the rest of everybody's last block: if
        # that were given to others, down to the last cell, each would lie in pieces of a few cells (R16). For the same
        # reason debts are counted in whole blocks, as those of large pages are in pages, where the pool is large enough
        # for everybody to have some.
        is_ahead = (limits.is_async or self.pool.block_len > 1) and limits.is_planner_on and limits.is_parking_on
        self.pressure_runway = limits.runway_steps if is_ahead else 0
        # `runway_steps` decode steps pass before anyone is parked.
        self.entry_runway = self.pressure_runway + limits.runway_steps
        self._unit_len = self.pool.block_len if self.pressure_runway else 1
        while self._unit_len > 1 and self._unit_len * limits.num_slots > limits.num_pages // _LEAST_UNITS:
            self._unit_len //= 2
        self._unit_cells = self._unit_len * limits.page_size
        size = limits.page_size
        runways = (0, self.pressure_runway, self.entry_runway)
        self._count_gaps = tuple(min(size - (len - 1 + runway) % size for runway in runways) for len in range(size))

    @property
    def is_copying(self) -> bool:
        return bool(self.preempting or self.restoring or self.departing or self.overdue)

    def is_quiet(self, now_ms: float) -> bool:
        """All who run decode, and a plan would do nothing beside: neither park, evict, bring back, admit nor refuse."""
        if not self.running or len(self.decoding) != len(self.running) or self.debt > self.pool.num_available:
            return False
        if self.forced or self.oversized:
            return False
        if not self.is_calm(now_ms) if self.parked else self.waiting and self.free_slots:
            return False  # while somebody is parked, nobody is admitted
        return not self.short or self.debt <= self.pool.num_free

    def is_calm(self, now_ms: float) -> bool:
        """It is known that nobody who is parked comes back now, and that no room is made for anyone."""
        if self.calm is None or not self._is_steady:
            return False
        return self.calm.holds(self.decoding.sequences, self.parked, self._spare_pages, now_ms)

    @property
    def _is_steady(self) -> bool:
        return self.rotation_head is None and not self.is_copying

    @property
    def _spare_pages(self) -> int:
        """The room for those who enter (R9)."""
        return self.pool.num_available - self.entry_debt

    def noted(self, plan: Plan, now_ms: float) -> Plan:
        """The same `plan`, which was made now: what it says of the steps to come is noted."""
        if self.parked and not self.is_calm(now_ms):
            self.calm = self._calm_after(plan, now_ms)
        return plan

    def _calm_after(self, plan: Plan, now_ms: float) -> Calm | None:
        is_idle = plan.has_nothing_but_parks and not plan.parks and not plan.num_evictions and not plan.rotation_head
        if not is_idle or not self._is_steady or len(self.decoding) != len(self.running):
            return None
        head, until_ms = min(self.parked.values(), key=self.policy.restore), math.inf
        if self.limits.is_planner_on and head.parked_at_ms is not None:
            until_ms = head.parked_at_ms + self.limits.rotation_delay_ms
        if now_ms > until_ms:
            return None
        ends = {self.cache.end_of_shared(each.tokens, self.match_limit(each)) for each in self.parked.values()}
        return Calm(self.decoding.sequences, standing(self.parked), self._spare_pages, until_ms, frozenset(ends))

    def wanted_pages(self, sequence: Sequence, runway: int) -> int:
        """Pages for all its tokens and `runway` cells more, to the end of a unit, within what it can ever need."""
        num_tokens = len(sequence.tokens)
        cells = num_tokens + runway
        if runway:
            cells += -cells % self._unit_cells
        if cells > sequence.max_cells:
            cells = sequence.max_cells if sequence.max_cells > num_tokens else num_tokens
        limits = self.limits
        wanted = -(-cells // limits.page_size)
        return wanted if wanted < limits.num_pages else limits.num_pages

    def is_behind_leader(self, sequence: Sequence) -> bool:
        """Its prompt is being computed by another sequence, whose pages it will share."""
        if sequence.prompt_leader is None:
            return False
        leader = self.live.get(sequence.prompt_leader)
        return leader is not None and not leader.is_generating

    def leader(self) -> Sequence | None:
        """The resident that is furthest along; the older one of equals."""
        residents = [*self.running.values(), *self.restoring.values()]
        return max(residents, key=lambda each: (each.furthest, -each.id), default=None)

    def victims(self) -> list[Sequence]:
        """Whom to park, best first (R4)."""
        leader, pool, key = self.leader(), self.pool, self.policy.victim
        starved = self.limits.starved_parks
        candidates = [each for each in self.running.values() if each is not leader]
        return sorted(candidates, key=lambda each: (each.num_parks >= starved, key(pool, each), -each.id))

    def match_limit(self, sequence: Sequence) -> int:
        """How many leading pages others may provide: full ones, and at least one token is left to compute."""
        request = sequence.request
        if not request.cache_prompt or request.prompt_logprobs is not None:
            return 0
        num_tokens = len(sequence.tokens) - 1
        if sequence.tier is not None and sequence.tier.is_copy:
            num_tokens = min(num_tokens, sequence.num_computed)
        return num_tokens // self.limits.page_size

    def known_tokens(self, sequence: Sequence) -> int:
        """Tokens of a prompt that the cache has now. A group's is looked up once: 131,072 small pages take 50 ms."""
        if sequence.prompt_leader is not None:
            return self.live[sequence.prompt_leader].num_known
        return len(self.cache.match(sequence.tokens, self.match_limit(sequence))) * self.limits.page_size

    def debts_of(self, sequence: Sequence) -> tuple[int, int]:
        """Pages that its next step and runway need beyond those it holds, and those with the runway of an entry."""
        limits, num_tokens, held = self.limits, len(sequence.tokens), len(sequence.pages)
        size = limits.page_size
        most_cells = sequence.max_cells if sequence.max_cells > num_tokens else num_tokens
        most = -(-most_cells // size)  # as wanted_pages, twice; the comparisons are quicker than min and max
        if most > limits.num_pages:
            most = limits.num_pages
        unit_len, unit_cells = self._unit_len, self._unit_cells
        wanted = -(-(num_tokens + self.pressure_runway) // unit_cells) * unit_len
        entry_wanted = -(-(num_tokens + self.entry_runway) // unit_cells) * unit_len
        debt = (wanted if wanted < most else most) - held
        entry_debt = (entry_wanted if entry_wanted < most else most) - held
        return debt if debt > 0 else 0, entry_debt if entry_debt > 0 else 0

    def is_short(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) > len(sequence.pages) * self.limits.page_size

    def next_count_len(self, num_tokens: int) -> int:
        """How many tokens a sequence of `num_tokens` has when next one of its pages is full or a runway enters one.

        Nothing else changes the pages that a generating sequence wants or has, so in between nobody looks.
        """
        return num_tokens + self._count_gaps[num_tokens % self.limits.page_size]

    @property
    def forces_parks(self) -> bool:
        return self.limits.preempt_every > 0 and self.limits.is_parking_on

    def forced_len(self, sequence: Sequence) -> int:
        """The number of tokens at which it is parked whatever the room, where parks are forced (R36)."""
        return sequence.prompt_len + (sequence.num_forced_parks + 1) * self.limits.preempt_every
