"""THE PLANNER: what one iteration does about pages, parked sequences, new ones and the rows of the step.

Pure: it reads the `View` that the ledger keeps, changes nothing, and returns a `Plan`. No torch, clock or I/O; the
caller says what time it is. All of it counts pages, rounded as the pool rounds (planning in tokens and allocating in
pages loses requests).

The numbers that decide:

    debt       pages that the running sequences lack for their next step and runway (R2, R9). The ledger keeps the sum,
               so that an iteration without pressure costs nothing here.
    available  pages that are free or that eviction can free now: cached prompts give way first (R3)
    leaving    pages that come free when the park copies in flight land

Relief parks one victim after another until debt <= available + leaving. The victim is never the leader; among the rest
one that is not starved, then the one with the fewest pages of its own (R4). A sequence comes back, or is admitted, when
all its tokens and its runway fit beside the runway of those that run (R12a). That runway is longer than the one that
relief keeps, by the same number of steps: otherwise the next step would park it again (R9).
Sizes are capped by what a sequence can ever need, at most the pool: that is how the runway is waived for one that has
the pool to itself (R8). Admission waits while a parked sequence does. In the queue a long prompt, but for what the
prompt cache had of it when it came, lets shorter ones pass that came soon after it, and one that does not fit those
that do, until the oldest has waited for the rotation delay. The parked head that waits longer than that gets room made
for it (R7); a sequence is not rotated out before it ran for that delay and got further than it was, however long its
copies take.

Whoever is to be computed again waits while one that runs computes what both begin with, and takes it from the prompt
cache then (R11). That one runs, so it comes to an end; should it leave the pool before, the next of them computes it.

Something always moves: the leader is never parked for pressure, its row comes first when pages are scarce, and once all
others are parked and landed every page but its own is available to it.

Not exact: pages that two victims of the same plan share are not counted as gained; the next plan sees them. Deep in the
waiting queue nobody looks at what a prompt shares, so that a long queue costs little.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyserve.plan import Admission, Failure, Park, ParkReason, Plan, Restore, Rows
from pyserve.policy import is_overdue
from pyserve.pool import PageSet
from pyserve.prefix import num_common_pages
from pyserve.sequence import Sequence, Tier
from pyserve.view import Room, View

WORTH_SHARING = 64  # tokens; fewer are computed in the step that waiting for them would cost
NUM_SHARERS = 4  # of the waiting that are passed, looked at with what they share; those behind must fit without


def plan(view: View, now_ms: float, room: Room) -> Plan:
    """What to do now. The plan's parks are taken off a copy of `room`."""
    return Plan(rows=Rows.of(view.decoding.sequences)) if view.is_quiet(now_ms) else decide(view, now_ms, room)


def decide(view: View, now_ms: float, room: Room) -> Plan:
    """The same where it is not known beforehand that nothing is to be done."""
    draft = _Draft(view, now_ms, room.copy())
    limits = view.limits
    if view.forced:
        draft.park_forced()
    if limits.is_parking_on and limits.is_planner_on:
        draft.relieve()
    if view.parked:
        draft.restore()
    if view.waiting and view.free_slots and not draft.is_restore_due:
        draft.admit()
    return draft.finish()


class _Draft:
    """A plan in the making, with the page counts as they will be once it is applied."""

    def __init__(self, view: View, now_ms: float, room: Room) -> None:
        self._view = view
        self._now_ms = now_ms
        self._room = room
        self._available = view.pool.num_available
        self._leaving = view.pool.num_leaving
        self._debt = view.debt
        self._vacated = PageSet()  # pages that the parks of this plan free, now or when they land
        self._copied = PageSet()  # those of them that a copy reads first
        self._fresh = 0  # pages to allocate for those that enter
        self._taken: set[int] = set()  # pages that those who enter share
        self._bringing: list[Sequence] = []  # whose copies bring pages that others may share, too
        self._parks: list[Park] = []
        self._gone = set(view.oversized)  # ids that get no row
        self._restores: list[Restore] = []
        self._admissions: list[Admission] = []
        self._entered: list[tuple[Sequence, int]] = []  # (runs from this step on, its computed tokens)
        self._rotation_head: Sequence | None = None
        self._refused: Sequence | None = None
        self.is_restore_due = False

    # Parks

    def park_forced(self) -> None:
        forced = self._view.forced
        for id, sequence in self._view.running.items():
            if id in forced and id not in self._gone:
                self._park(sequence, "forced")

    def relieve(self) -> None:
        if self._debt <= self._available + self._leaving:
            return
        for victim in self._victims():
            if victim.debt or victim.pages:
                self._park(victim, "pool_full")
            if self._debt <= self._available + self._leaving:
                return

    def _victims(self) -> Iterator[Sequence]:
        return (each for each in self._view.victims() if each.id not in self._gone)

    def _park(self, sequence: Sequence, reason: ParkReason) -> None:
        tier, num_copied = self._room.tier_of(sequence)
        self._room.use(tier, sequence)
        pool, pages = self._view.pool, sequence.pages
        first_own = len(pages) - pool.num_own(pages)
        behind = max(first_own, num_copied)  # pages reserved beyond what is computed, which come free at once
        copied = pages[first_own:behind] + [page for page in pages[behind:] if pool.readers[page]]
        self._vacated.add(pages[first_own:])
        self._copied.add(copied)
        self._leaving += len(copied)
        self._available += len(pages) - first_own - len(copied)
        self._debt -= sequence.debt
        self._gone.add(sequence.id)
        self._parks.append(Park(sequence, reason, tier))

    # Restores

    def restore(self) -> None:
        """All that fit, in order; one that does not fit holds up nobody, unless room is being made for it (R6, R7)."""
        queue = sorted(self._view.parked.values(), key=self._view.policy.restore)
        head = self._view.rotation_head
        if head is not None:  # whoever made room for it may have been parked more often
            queue.remove(head)
            queue.insert(0, head)
        reserve = self._entry_reserve()
        view = self._view
        prompts = [each for id, each in view.running.items() if id not in view.decoding.by_id and id not in self._gone]
        computing = [(each, each.num_computed) for each in prompts if each.cache_node is not None]
        for sequence in queue:
            if sequence is not head and self._is_being_computed(sequence, computing):
                self.is_restore_due = True
                continue
            cost = self._cost(sequence, self._vacated)
            if cost <= self._available - reserve:
                self._bring_back(sequence)
                continue
            self.is_restore_due = True
            if sequence is queue[0] and self._is_overdue(sequence) and self._make_room(sequence, reserve):
                self._rotation_head = sequence
                return

    def _is_being_computed(self, sequence: Sequence, computing: list[tuple[Sequence, int]]) -> bool:
        """It would compute what one of `computing`, or one that comes back before it, computes now.

        Told from the beginning and the stretch that is next: enough to know, and cheap. Where two differ in between it
        costs one of them some waiting.
        """
        if self._is_copied(sequence):
            return False
        view, tokens = self._view, sequence.tokens
        limit = view.match_limit(sequence) * view.limits.page_size
        for other, start in [*computing, *self._entered]:
            end = start + WORTH_SHARING
            if end > min(limit, len(other.tokens)) or tokens[start:end] != other.tokens[start:end]:
                continue
            if tokens[:WORTH_SHARING] == other.tokens[:WORTH_SHARING]:
                return True
        return False

    def _bring_back(self, sequence: Sequence) -> None:
        num_cached = self._enter(sequence)
        assert sequence.tier is not None
        tier = Tier.RECOMPUTE if sequence.tier in self._room.slow else sequence.tier
        self._restores.append(Restore(sequence, tier, num_cached))
        if tier is Tier.RECOMPUTE:
            self._entered.append((sequence, num_cached * self._view.limits.page_size))
        elif self._view.match_limit(sequence):
            self._bringing.append(sequence)

    def _is_overdue(self, head: Sequence) -> bool:
        limits = self._view.limits
        if not limits.is_planner_on or head.parked_at_ms is None:
            return False
        return self._now_ms - head.parked_at_ms > limits.rotation_delay_ms

    def _make_room(self, head: Sequence, reserve: int) -> bool:
        """Rotation. True: the pages that `head` needs are on their way, and nobody may slip into them."""
        victims = self._rotation_victims(head, reserve)
        if victims is None:
            return False
        if not self._room.can_hold(victims):
            self._refused = None if head.is_refusal_told else head
            return False
        for victim in victims:
            self._park(victim, "rotation")
        return True

    def _rotation_victims(self, head: Sequence, reserve: int) -> list[Sequence] | None:
        """Nobody if the room is on its way; the first that makes it alone, or the first few together; None: it cannot
        be made."""
        if self._is_room(head, reserve, []):
            return []
        latest = self._now_ms - self._view.limits.rotation_delay_ms
        candidates = [each for each in self._victims() if each.resident_since_ms <= latest and each.has_advanced]
        for victim in candidates:
            if self._is_room(head, reserve, [victim]):
                return [victim]
        for count in range(2, len(candidates) + 1):
            if self._is_room(head, reserve, candidates[:count]):
                return candidates[:count]
        return None

    def _is_room(self, head: Sequence, reserve: int, victims: list[Sequence]) -> bool:
        """Whether `head` fits once `victims` and those that leave already are gone."""
        gain = 0
        vacated = self._vacated if not victims else PageSet(self._vacated)
        for victim in victims:
            num_own = self._view.pool.num_own(victim.pages)
            gain += num_own + victim.entry_debt
            vacated.add(victim.pages[len(victim.pages) - num_own :])
        return self._cost(head, vacated) + reserve <= self._available + self._leaving + gain

    # Entering the pool: restores and admissions

    def _entry_reserve(self) -> int:
        """Pages that those who run may claim before a newcomer does (R9)."""
        running = self._view.running
        return self._view.entry_debt - sum(running[id].entry_debt for id in self._gone if id in running)

    def _cost(self, sequence: Sequence, vacated: PageSet) -> int:
        """Available pages that it takes to bring all of `sequence` in, with its runway, once `vacated` are let go."""
        view = self._view
        wanted = view.wanted_pages(sequence, view.entry_runway)
        limit, is_copied = view.match_limit(sequence), self._is_copied(sequence)
        num_shared = view.cache.num_shared(sequence.tokens, limit, vacated, self._taken, with_filling=is_copied)
        return wanted - max(num_shared, self._num_brought(sequence) if is_copied else 0)

    def _is_copied(self, sequence: Sequence) -> bool:
        """It comes back by a copy, and so can wait for another's."""
        tier = sequence.tier
        return tier is not None and tier.is_copy and tier not in self._room.slow

    def _num_brought(self, sequence: Sequence) -> int:
        """How many leading pages it has in common with one that comes back in this plan (R11)."""
        limit, size = self._view.match_limit(sequence), self._view.limits.page_size
        found = 0
        for other in self._bringing:  # most of them have the same pages in common with it: a look at the next one tells
            num_pages = min(limit, other.num_computed // size)
            found = num_common_pages(other.tokens, sequence.tokens, size, num_pages, beyond=found)
        return found

    def _enter(self, sequence: Sequence) -> int:
        """Counts its pages as taken. Returns how many of them others provide."""
        view = self._view
        is_copied = self._is_copied(sequence)
        chain = view.cache.match(sequence.tokens, view.match_limit(sequence), with_filling=is_copied)
        wanted = view.wanted_pages(sequence, view.entry_runway)
        for node in chain:
            if node.page in self._taken:
                continue
            self._taken.add(node.page)
            if view.pool.holders[node.page] and node.page not in self._vacated:
                continue
            if view.pool.readers[node.page] or node.page in self._copied:
                self._leaving -= 1
            else:
                self._available -= 1
        num_shared = max(len(chain), self._num_brought(sequence) if is_copied else 0)
        self._available -= wanted - num_shared
        self._fresh += wanted - num_shared
        return num_shared

    def admit(self) -> None:
        """In order of their places. Smaller ones may pass one that does not fit, but none the head that is overdue."""
        view = self._view
        slots = sorted(view.free_slots)
        predicted, max_passed = view.policy.predicted_tokens, view.policy.max_passed
        room = self._available - self._entry_reserve()
        if predicted:
            room -= sum(self._predicted_growth(each, predicted) for each in view.running.values())
        num_passed = 0
        overdue_ms = self._now_ms - view.limits.rotation_delay_ms
        for sequence in view.policy.queue(view.waiting, overdue_ms) if room > 0 else ():
            if room <= 0 or len(self._admissions) == len(slots) or num_passed > max_passed:
                return
            if num_passed > NUM_SHARERS and len(sequence.tokens) > room * view.limits.page_size:
                num_passed += 1  # it is a long queue that makes this loop long
                continue
            if sequence.id in self._gone or view.is_behind_leader(sequence):
                continue
            growth = self._predicted_growth(sequence, predicted) if predicted else 0
            if self._cost(sequence, self._vacated) + growth <= room:
                available = self._available
                num_cached = self._enter(sequence)
                room -= available - self._available + growth
                self._admissions.append(Admission(sequence, slots[len(self._admissions)], num_cached))
                self._entered.append((sequence, num_cached * view.limits.page_size))
                continue
            num_passed += 1
            if is_overdue(sequence, overdue_ms):
                return

    def _predicted_growth(self, sequence: Sequence, predicted: int) -> int:
        """Pages that it lacks for an answer of `predicted` tokens, beyond its runway. None where nobody runs, so that
        nothing waits for ever.
        """
        view = self._view
        missing = view.wanted_pages(sequence, max(0, predicted - sequence.num_generated))
        return max(0, missing - view.wanted_pages(sequence, view.entry_runway)) if view.running else 0

    # Rows

    def finish(self) -> Plan:
        rows = self._rows()
        will_copy = self._view.is_copying or any(park.tier.is_copy for park in self._parks)
        size = self._view.limits.page_size
        will_copy = will_copy or any(
            restore.tier.is_copy and restore.cached_pages * size < restore.sequence.num_computed
            for restore in self._restores
        )
        is_freeing = bool(self._gone) and (
            bool(self._view.oversized) or any(park.tier is Tier.RECOMPUTE for park in self._parks)
        )
        return Plan(
            num_evictions=self._num_evictions(rows),
            parks=tuple(self._parks),
            restores=tuple(self._restores),
            admissions=tuple(self._admissions),
            failures=tuple(Failure(each, "never_fits") for each in self._view.oversized.values()),
            rows=rows,
            must_wait_for_copy=not rows and will_copy and not is_freeing,
            rotation_head=self._rotation_head,
            refused_rotation=self._refused,
        )

    def _rows(self) -> Rows:
        """Decode rows, then prompt chunks within `batch_tokens`."""
        view = self._view
        if not self._gone and self._debt <= self._available:
            rows = Rows(view.decoding.sequences)
            if len(rows) < len(view.running) or self._entered:
                self._add_chunks(rows, [each for each in view.running.values() if each.id not in view.decoding.by_id])
            return rows
        order = self._row_order()
        rows = Rows(each for each in order if each.id in view.decoding.by_id)
        self._add_chunks(rows, [each for each in order if each.id not in view.decoding.by_id])
        return rows

    def _add_chunks(self, rows: Rows, prompts: list[Sequence]) -> None:
        budget = self._view.limits.batch_tokens
        for sequence, computed in [*((each, each.num_computed) for each in prompts), *self._entered]:
            if not budget:
                return
            num_pending = len(sequence.tokens) - computed
            length = min(num_pending, budget)
            rows.add(sequence, computed, length, length == num_pending)
            budget -= length

    def _row_order(self) -> list[Sequence]:
        """Who runs: all that are not parked; when pages are scarce the leader first, then as many as fit."""
        view = self._view
        running = list(view.running.values())
        if self._gone:
            running = [each for each in running if each.id not in self._gone]
        if self._debt <= self._available:
            return running
        leader = max(running, key=lambda each: (each.furthest, -each.id), default=None)
        if leader is not None:
            running.remove(leader)
            running.insert(0, leader)
        if not (view.limits.is_planner_on and view.limits.is_parking_on):
            return running  # the ledger finds out, and takes the last resort
        return list(self._fitting(running))

    def _fitting(self, running: list[Sequence]) -> Iterator[Sequence]:
        left = self._available
        for sequence in running:
            needed = self._missing_pages(sequence)
            if needed <= left:
                left -= needed
                yield sequence

    def _num_evictions(self, rows: Rows) -> int:
        num_free = self._view.pool.num_free
        if max(0, self._debt) + self._fresh <= num_free:
            return 0
        short = self._view.short
        steps = sum(self._missing_pages(each) for each in rows.sequences if each.id in short) if short else 0
        return max(0, self._fresh + steps - num_free)

    def _missing_pages(self, sequence: Sequence) -> int:
        return max(0, self._view.wanted_pages(sequence, 0) - len(sequence.pages))
