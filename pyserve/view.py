"""The view: everything that the planner reads. The ledger keeps it up to date, and nobody else changes it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from pyserve.plan import Limits
from pyserve.pool import Pool
from pyserve.prefix import PrefixCache
from pyserve.sequence import Sequence, Tier


@dataclass(slots=True)
class Room:
    """Pages that the tiers could still take (R22, R23)."""

    page_size: int
    ram_pages: int
    disk_pages: int = 0

    def tier_of(self, sequence: Sequence) -> tuple[Tier, int]:
        """The tier that takes it, best first, and the pages it takes there. Nothing computed is nothing to copy."""
        num_pages = -(-sequence.num_computed // self.page_size)
        if 0 < num_pages <= self.ram_pages:
            return Tier.RAM, num_pages
        if 0 < num_pages <= self.disk_pages:
            return Tier.DISK, num_pages
        return Tier.RECOMPUTE, 0

    def use(self, tier: Tier, num_pages: int) -> None:
        """So many pages are parked there."""
        if tier is Tier.RAM:
            self.ram_pages -= num_pages
        elif tier is Tier.DISK:
            self.disk_pages -= num_pages

    def can_hold(self, sequences: list[Sequence]) -> bool:
        """Whether none of them would have to be computed again."""
        room = replace(self)
        for sequence in sequences:
            tier, num_pages = room.tier_of(sequence)
            if sequence.num_computed and not tier.is_copy:
                return False
            room.use(tier, num_pages)
        return True


def restore_order(sequence: Sequence) -> tuple[int, float, int]:
    """Most parked first, then longest parked (R6)."""
    return (-sequence.num_parks, sequence.parked_at_ms or 0.0, sequence.id)


@dataclass(slots=True)
class View:
    """Everything that the planner may read. Dictionaries by sequence id, in the order of arrival there."""

    limits: Limits
    pool: Pool
    cache: PrefixCache
    live: dict[int, Sequence] = field(default_factory=dict)  # submitted and not ended
    waiting: deque[Sequence] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)
    preempting: dict[int, Sequence] = field(default_factory=dict)
    parked: dict[int, Sequence] = field(default_factory=dict)
    restoring: dict[int, Sequence] = field(default_factory=dict)
    departing: dict[int, Sequence] = field(default_factory=dict)  # ended, a copy still in flight
    overdue: dict[int, list[int]] = field(default_factory=dict)  # pages of copies that nobody waits for, by copy id
    oversized: dict[int, Sequence] = field(default_factory=dict)  # more tokens than the whole pool holds
    free_slots: list[int] = field(default_factory=list)
    pressure_runway: int = field(init=False)  # cells kept clear per sequence: none where a park lands at once
    rotation_head: Sequence | None = None  # parked, and room was made for it
    debt: int = 0  # the sum of the running sequences' debts

    def __post_init__(self) -> None:
        limits = self.limits
        is_ahead = limits.is_async and limits.is_planner_on and limits.is_parking_on
        self.pressure_runway = limits.runway_steps if is_ahead else 0

    @property
    def is_copying(self) -> bool:
        return bool(self.preempting or self.restoring or self.departing or self.overdue)

    @property
    def entry_runway(self) -> int:
        """Cells that are clear per sequence when one enters: `runway_steps` decode steps before anyone is parked."""
        return self.pressure_runway + self.limits.runway_steps

    def wanted_pages(self, sequence: Sequence, runway: int) -> int:
        """Pages for all its tokens and `runway` cells more, within what it can ever need."""
        cells = len(sequence.tokens)
        cells = max(cells, min(cells + runway, sequence.max_cells))
        return min(-(-cells // self.limits.page_size), self.limits.num_pages)

    def is_behind_leader(self, sequence: Sequence) -> bool:
        """Its prompt is being computed by another sequence, whose pages it will share."""
        if sequence.prompt_leader is None:
            return False
        leader = self.live.get(sequence.prompt_leader)
        return leader is not None and not leader.is_generating

    def leader(self) -> Sequence | None:
        """The resident that is furthest along; the older one of equals."""
        residents = [*self.running.values(), *self.restoring.values()]
        return max(residents, key=lambda each: (each.progress, -each.id), default=None)

    def victims(self) -> list[Sequence]:
        """Whom to park, best first (R4)."""
        leader = self.leader()
        starved = self.limits.starved_parks
        candidates = [each for each in self.running.values() if each is not leader]
        own = self.pool.num_own
        return sorted(candidates, key=lambda each: (each.num_parks >= starved, own(each.pages), -each.id))

    def match_limit(self, sequence: Sequence) -> int:
        """How many leading pages the prompt cache may provide; at least one token is left to compute or copy."""
        request = sequence.request
        if not request.cache_prompt or request.prompt_logprobs is not None:
            return 0
        is_copied = sequence.tier is not None and sequence.tier.is_copy
        num_tokens = sequence.num_computed if is_copied else len(sequence.tokens)
        return (num_tokens - 1) // self.limits.page_size

    def debt_of(self, sequence: Sequence) -> int:
        """Pages that its next step and runway need beyond those it holds."""
        return max(0, self.wanted_pages(sequence, self.pressure_runway) - len(sequence.pages))
