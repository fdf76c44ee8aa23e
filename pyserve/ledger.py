"""THE LEDGER: owner of pool, prompt cache, slots and queues; the only place where they change.

The engine drives it: submit, then for every iteration the landings and cancels since the last one, `plan`, `apply`, the
copies and the step that the applied plan asks for, `step_done`. Tests and the policy simulator drive the same object.

A life: submit -> WAITING -> (admission) RUNNING -> ... -> finish. Parked in between, any number of times:

    RUNNING -> PREEMPTING -> PREEMPTED -> RESTORING -> RUNNING    tier RAM: a copy out, a copy back
    RUNNING ---------------> PREEMPTED --------------> RUNNING    tier RECOMPUTE: no copy, the tokens run again

Tier DISK is like RAM. A copy that does not end in time is waited for no longer: its sequence is PREEMPTED, to be
computed again, and its pages stay in transfer under the copy's number until it has ended.

Restores of one moment share the pages that they have in common before these are filled (incoming.py).

A sequence that ends while a copy of its pages is in flight is FINISHED at once and gives pages and slot back when
the copy lands (R20). All pages that a sequence needs to enter are reserved together (R12a). `apply` is where a step
can find no page, because the planner is off, wrong, or not allowed to park: that is the last resort (R24, R25).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import replace

from pyserve import integrity, planner
from pyserve.census import Census
from pyserve.errors import Unavailable
from pyserve.incoming import Incoming
from pyserve.plan import Admission, Failure, Limits, Park, Plan, Restore, Rows
from pyserve.policy import Policy
from pyserve.pool import Pool
from pyserve.prefix import PrefixCache
from pyserve.residents import Residents
from pyserve.sequence import Sequence, State, Tier, pass_leadership
from pyserve.view import Room, SparedPages, View

__all__ = ["Ledger", "Limits"]

BLOCK_TOKENS = 16  # cells that a sequence takes at a time where pages are small; more would leave the runway in pieces


class Ledger(Census):
    """One pool and everyone on it."""

    def __init__(self, limits: Limits, policy: Policy | None = None) -> None:
        self.limits = limits
        pool = Pool(limits.num_pages, max(1, BLOCK_TOKENS // limits.page_size))
        super().__init__(View(limits, pool, PrefixCache(pool, limits.page_size), policy or Policy()))
        self._view.free_slots = list(range(limits.num_slots))
        self._room = Room(limits.page_size, 0)  # what the parks of this iteration have left of it
        self._residents = Residents(self._view)
        self._incoming = Incoming(self._view, self._residents, self._filling)
        self._back: list[Sequence] = []  # those whose restore has ended since the last plan

    # Arrivals

    def submit(self, sequences: List[Sequence]) -> None:
        """All sequences of one request. Raises Unavailable when the queue is full."""
        view, limits = self._view, self.limits
        if len(view.waiting) + len(sequences) - len(view.free_slots) > limits.max_queue:
            raise Unavailable("the request queue is full, try again later", retry_after_s=1)
        for sequence in sequences:
            assert sequence.state is State.WAITING and sequence.id not in view.live, f"{sequence} was submitted before"
            request = sequence.request
            wanted = limits.context_len if request.max_tokens is None else max(1, request.max_tokens)
            sequence.max_cells = min(limits.context_len, sequence.prompt_len + wanted - 1)
            sequence.num_known = view.known_tokens(sequence)
            view.live[sequence.id] = sequence
            view.waiting.append(sequence)
            if sequence.prompt_len > limits.context_len:
                view.oversized[sequence.id] = sequence

    # One iteration

    def plan(
        self,
        now_ms: float,
        host_free_pages: int,
        disk_free_pages: int = 0,
        slow: frozenset[Tier] = frozenset(),
        open_outlook: Callable[[], SparedPages] | None = None,
    ) -> Plan:
        """What to do now; nothing is changed, but it is noted since when the head waits and those that are back run.
        Free pages: what the RAM tier and the disk tier could still take. `slow` and `open_outlook` as in `Room`.
        """
        self._room = Room(self.limits.page_size, host_free_pages, disk_free_pages, slow, open_outlook)
        while self._back:
            self._back.pop().resident_since_ms = now_ms
        for sequence in self._view.waiting:
            if not self._view.is_behind_leader(sequence):
                if sequence.waiting_since_ms is None:
                    sequence.waiting_since_ms = now_ms
                break
        return self._view.noted(planner.plan(self._view, now_ms, self._room), now_ms)

    def apply(self, plan: Plan, now_ms: float) -> Plan:
        """Carries `plan` out, and returns it as carried out: the last resort may change parks, failures and rows."""
        num_evicted = self._residents.num_evicted
        for failure in plan.failures:
            self.finish(failure.sequence, now_ms)
        for park in plan.parks:
            self._park(park, now_ms)
        if plan.restores or plan.admissions:
            self._enter_all(plan, now_ms)
        self._view.rotation_head = plan.rotation_head
        if plan.refused_rotation is not None:
            plan.refused_rotation.is_refusal_told = True
        missing = self._residents.allocate_rows(plan.rows.sequences)
        if missing:
            plan = self._take_last_resort(plan, missing, now_ms)
        num_evicted = self._residents.num_evicted - num_evicted
        return plan if plan.num_evictions == num_evicted else replace(plan, num_evictions=num_evicted)

    def follow(self, running: Rows, places: list[int], plan: Plan) -> Rows | None:
        """The decode rows to run behind the step of `running`; their pages are theirs then: first those behind its rows
        at `places`, then those of who runs but is not in that step (back from a park since it began), whose token is
        known. Nobody may be at `places` whom `plan`, what would be done now, parks: that is done beside the new step.

        None: there is something else to do first, a prompt has to go on, or no page is left. A sequence may end before
        its row has run; what that writes is in no page that anyone reads, because what is copied or computed from there
        on comes after it.
        """
        view, sequences = self._view, running.sequences
        if not plan.has_nothing_but_parks:
            return None
        if not self.limits.is_async if plan.parks else plan.rotation_head is not view.rotation_head:
            return None
        if len(plan.rows) + len(plan.parks) != len(view.running):
            return None
        rows = running.following(places)
        num_outside = len(view.running) - [each.state for each in sequences].count(State.RUNNING)
        if num_outside:
            inside = {each.id for each in sequences}
            outside = [each for id, each in view.decoding.by_id.items() if id not in inside]
            if len(outside) != num_outside:
                return None
            leaving = {park.sequence.id for park in plan.parks}
            rows.add_decoding(each for each in outside if each.id not in leaving)
        if rows.sequences == view.decoding.sequences:
            rows.sequences = view.decoding.sequences  # so that the next step may be a repetition
        return rows if rows and self._residents.have_pages(rows) else None

    def may_repeat(self, rows: Rows, now_ms: float) -> bool:
        """Whether decode rows of the same sequences may run behind the step of `rows`; their pages are theirs then. As
        `follow`, without a plan: nobody came or went since those rows were planned, and nothing else is to be done.
        """
        view = self._view
        if rows.sequences is not view.decoding.sequences or not view.is_quiet(now_ms):
            return False
        if view.waiting and view.waiting[0].waiting_since_ms is None:
            return False  # a plan has to note when it came to the head
        return self._residents.have_pages_again(rows.sequences)

    def step_done(self, rows: Rows, picked: List[int]) -> None:
        """The step ran. `picked`: the next token of each row that samples, in their order."""
        self._residents.step_done(rows, picked)

    # Landings

    def park_landed(self, sequence: Sequence) -> None:
        """The copy out is done: its pages come free."""
        view = self._view
        was_ended = view.departing.pop(sequence.id, None) is not None
        if not was_ended:
            assert view.preempting.pop(sequence.id, None) is sequence, f"no park of {sequence} is in flight"
        view.cache.let_go(view.pool.stop_reading(sequence.pages))
        sequence.pages = []
        if was_ended:
            self._free_slot(sequence)
        else:
            sequence.state = State.PREEMPTED
            view.parked[sequence.id] = sequence

    def park_failed(self, sequence: Sequence) -> None:
        """The copy out failed: the sequence is parked all the same, to be computed again."""
        self.park_landed(sequence)
        self.drop_parked(sequence)

    def drop_parked(self, sequence: Sequence) -> None:
        """The parked copy of a PREEMPTED sequence is gone: it will be computed again."""
        sequence.recompute()

    def restore_landed(self, sequence: Sequence) -> None:
        """The copy back is done, as are those that fill pages which it shares: the sequence runs again."""
        self._incoming.filled(sequence)
        if self._end_restore(sequence):
            self._residents.resume(sequence)

    def restore_failed(self, sequence: Sequence, kept_in: Tier | None = None) -> None:
        """The copy back failed, or one that fills pages which it shares. The sequence runs as a prompt, from the pages
        that it shares on; without those it is parked again: in the tier `kept_in` if its parked state is there still.
        """
        num_shared, num_parked = self._incoming.not_filled(sequence), self._incoming.num_parked(sequence)
        if not self._end_restore(sequence):
            return
        if self._incoming.is_forsaken(sequence):
            self._residents.release(sequence)
            self._park_again(sequence, sequence.resident_since_ms)
            if kept_in is not None:
                sequence.tier, sequence.num_computed, sequence.parked_cells = kept_in, num_parked, num_parked
            return
        assert kept_in is None, f"{sequence} shares nothing that was not filled"
        sequence.progress = sequence.furthest
        sequence.num_computed = num_shared * self.limits.page_size
        self._residents.start(sequence)

    def moved_to_disk(self, sequence: Sequence) -> None:
        """The parked copy of a PREEMPTED sequence is on disk now."""
        sequence.tier = Tier.DISK

    def copy_overdue(self, sequence: Sequence, copy_id: int, now_ms: float) -> None:
        """The copy, out or back, is not waited for any longer. Its pages stay in transfer until `overdue_landed`."""
        view = self._view
        was_ended = view.departing.pop(sequence.id, None) is not None
        if sequence in self._incoming:
            view.restoring.pop(sequence.id, None)
            self._incoming.overdue(sequence)
        else:
            view.preempting.pop(sequence.id, None)
        view.overdue[copy_id] = sequence.pages
        sequence.pages = []
        if was_ended:
            self._free_slot(sequence)
        else:
            self._park_again(sequence, now_ms)

    def overdue_landed(self, copy_id: int) -> None:
        """An overdue copy has ended: its pages come free."""
        pages = self._view.overdue.pop(copy_id)
        self._view.cache.let_go(self._view.pool.stop_reading(pages))

    def copy_lost(self, sequence: Sequence) -> None:
        """No copy of an ended sequence is in flight, whatever was planned: its pages and slot come free."""
        (self.restore_failed if sequence in self._incoming else self.park_landed)(sequence)

    def finish(self, sequence: Sequence, now_ms: float, *, is_sound: bool = True) -> bool:
        """Ended or cancelled, in whatever state; harmless when repeated.

        False: a copy is in flight, and pages and slot come free when it lands. Full pages stay in the prompt cache,
        unless one that runs is not sound, for then nobody may go on from them; what others hold as well stays.
        """
        view = self._view
        state = sequence.state
        if state is State.FINISHED:
            return sequence.id not in view.departing
        if sequence.parked_at_ms is not None:
            sequence.preempted_ms += now_ms - sequence.parked_at_ms
            sequence.parked_at_ms = None
        sequence.state = State.FINISHED
        del view.live[sequence.id]
        view.oversized.pop(sequence.id, None)
        if state is State.WAITING:
            view.waiting.remove(sequence)
        elif state is State.RUNNING:
            self._residents.end(sequence, is_kept=is_sound)
            self._free_slot(sequence)
        elif state is State.PREEMPTED:
            del view.parked[sequence.id]
            if view.rotation_head is sequence:
                view.rotation_head = None
            self._free_slot(sequence)
        else:
            del (view.preempting if state is State.PREEMPTING else view.restoring)[sequence.id]
            view.departing[sequence.id] = sequence
        if not sequence.is_generating:
            pass_leadership(sequence, view.waiting)
        return sequence.id not in view.departing

    # Parts

    def _park(self, park: Park, now_ms: float) -> None:
        sequence = park.sequence
        assert sequence.state is State.RUNNING, f"{sequence} cannot be parked"
        self._residents.stop(sequence)
        sequence.num_parks += 1
        sequence.parked_at_ms = now_ms
        sequence.tier = park.tier
        sequence.is_refusal_told = False
        sequence.cache_node = None
        if park.reason == "forced" and self.limits.preempt_every:
            sequence.num_forced_parks = sequence.num_generated // self.limits.preempt_every
        if park.tier is Tier.RECOMPUTE:
            self._residents.release(sequence)
            sequence.recompute()
            sequence.state = State.PREEMPTED
            self._view.parked[sequence.id] = sequence
            return
        num_copied = -(-sequence.num_computed // self.limits.page_size)
        self._room.use(park.tier, sequence)
        self._residents.release(sequence, start=num_copied)
        self._view.pool.start_reading(sequence.pages)
        sequence.parked_cells = sequence.num_computed
        sequence.state = State.PREEMPTING
        self._view.preempting[sequence.id] = sequence

    def _enter_all(self, plan: Plan, now_ms: float) -> None:
        """Restores and admissions. All take their shared pages before any eviction, which could take them away."""
        entries: list[Restore | Admission] = [*plan.restores, *plan.admissions]
        match = self._view.cache.match
        chains = [match(each.sequence.tokens, each.cached_pages, with_filling=True) for each in entries]
        for entry, chain in zip(entries, chains, strict=True):
            entry.sequence.pages = self._view.cache.take(chain)
        for entry, chain in zip(entries, chains, strict=True):
            chain = self._residents.adopt(entry.sequence, chain, entry.cached_pages)
            self._residents.reserve(entry.sequence, chain)
            entry.sequence.resident_since_ms = now_ms
            if isinstance(entry, Restore):
                self._restore(entry, now_ms)
            else:
                self._admit(entry)
            entry.sequence.progress = entry.sequence.furthest

    def _restore(self, restore: Restore, now_ms: float) -> None:
        sequence = restore.sequence
        del self._view.parked[sequence.id]
        assert sequence.parked_at_ms is not None
        sequence.preempted_ms += now_ms - sequence.parked_at_ms
        sequence.parked_at_ms = sequence.tier = None
        if restore.tier is Tier.RECOMPUTE:
            sequence.parked_cells = 0
            sequence.num_computed = restore.cached_pages * self.limits.page_size
            self._residents.start(sequence)
            return
        sequence.state = State.RESTORING
        self._view.restoring[sequence.id] = sequence
        self._incoming.begin(sequence, restore.cached_pages)

    def _park_again(self, sequence: Sequence, since_ms: float) -> None:
        """It is to be computed again; it has no pages."""
        if sequence.parked_at_ms is None:
            sequence.parked_at_ms = since_ms
        sequence.cache_node = None
        sequence.state = State.PREEMPTED
        self._view.parked[sequence.id] = sequence
        sequence.recompute()

    def _end_restore(self, sequence: Sequence) -> bool:
        """False: the sequence ended meanwhile, and is gone now."""
        view = self._view
        sequence.parked_cells = 0
        if view.departing.pop(sequence.id, None) is not None:
            self._residents.release(sequence)
            self._free_slot(sequence)
            return False
        del view.restoring[sequence.id]
        self._back.append(sequence)
        return True

    def _admit(self, admission: Admission) -> None:
        sequence = admission.sequence
        self._view.waiting.remove(sequence)
        self._view.free_slots.remove(admission.slot)
        self._slots[admission.slot] = sequence
        sequence.slot = admission.slot
        sequence.num_computed = admission.cached_pages * self.limits.page_size
        sequence.num_cached = sequence.num_computed
        self._residents.start(sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None and self._slots[sequence.slot] is sequence
        self._slots[sequence.slot] = None
        self._view.free_slots.append(sequence.slot)

    # The last resort

    def _take_last_resort(self, plan: Plan, missing: list[Sequence], now_ms: float) -> Plan:
        """Nothing of the step was computed yet, so every sequence is at a token boundary and rows can be dropped."""
        parks, failures = list(plan.parks), list(plan.failures)
        while missing and not self._view.preempting:
            if self.limits.is_parking_on:
                victim = next(iter(self._view.victims()), None)
                if victim is None:
                    break
                tier, _ = self._room.tier_of(victim)
                parks.append(Park(victim, "last_resort", tier))
                self._park(parks[-1], now_ms)
            elif any(each.reason == "pool_full" for each in failures):
                break
            else:
                own = self._view.pool.num_own
                victim = max(self._view.running.values(), key=lambda each: (own(each.pages), each.id))
                failures.append(Failure(victim, "pool_full"))
                self.finish(victim, now_ms)
            missing = self._residents.allocate_rows([each for each in plan.rows.sequences if each in missing])
        dropped = {each.id for each in missing}
        rows = Rows()
        for row in plan.rows.columns():
            if row[0].state is State.RUNNING and row[0].id not in dropped:
                rows.add(*row)
        is_freeing = bool(failures) or any(park.tier is Tier.RECOMPUTE for park in parks)
        must_wait = not rows and self._view.is_copying and not is_freeing
        return replace(plan, parks=tuple(parks), failures=tuple(failures), rows=rows, must_wait_for_copy=must_wait)

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong. Made for every step of a test, not for production."""
        integrity.check(self._view, self._slots, self._filling)
