"""The residents: the sequences whose pages are in the pool. What they hold, and what their next steps want.

The ledger calls this, nobody else. In the steady state a step costs each sequence the append of its token; its pages,
debts and cache entries are looked at only where its tokens or a runway enter a page (`_enter_pages`). While the same
sequences decode, step after step, `Visits` knows which those are, and nobody asks the others.

The prompt cache is told of a page when it is full. Whoever comes back by a copy brings thousands at once: those that
another begins with as well are made known before they are filled (incoming.py), the rest step by step once it runs, or
when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from pyserve.decoding import Visits
from pyserve.plan import Rows
from pyserve.prefix import Node, num_common_pages
from pyserve.sequence import Sequence, State
from pyserve.view import View

TOLD_AT_ONCE = 2048  # pages of one who has come back: some 1.3 ms of the loop
EVICTED_AHEAD = 128  # tokens of room that are made for each running sequence when any is needed
EVICTED_AT_ONCE = 768  # pages at most for that room: some 0.6 ms of the loop where pages are small


class Residents:
    """Changes running sequences and what `view` says of them."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.num_evicted = 0  # pages, ever
        self.evicted_ahead = EVICTED_AHEAD
        self._visits = Visits([])  # of those in the last step
        self._partly_told: set[int] = set()  # ids of those who came back, until the cache knows all their pages

    def start(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self._view.running[sequence.id] = sequence
        self._look_at(sequence)

    def resume(self, sequence: Sequence) -> None:
        """It runs again, on pages that a copy has filled."""
        self._register(sequence, self._num_in_common(sequence))
        self._partly_told.add(sequence.id)
        self.start(sequence)

    def end(self, sequence: Sequence, *, is_kept: bool) -> None:
        """It is over. `is_kept`: the prompt cache may keep what it leaves."""
        if is_kept and sequence.id in self._partly_told:
            self._register(sequence, sequence.num_computed // self._view.limits.page_size)
        pages = [*sequence.pages]
        self.stop(sequence)
        self.release(sequence)
        if not is_kept:
            self._view.cache.drop(pages)

    def stop(self, sequence: Sequence) -> None:
        view, id = self._view, sequence.id
        self._partly_told.discard(id)
        del view.running[id]
        view.decoding.discard(id)
        view.short.pop(id, None)
        view.forced.pop(id, None)
        view.debt -= sequence.debt
        view.entry_debt -= sequence.entry_debt
        sequence.debt = sequence.entry_debt = 0

    def _look_at(self, sequence: Sequence) -> None:
        """Looks at a running sequence that stands elsewhere than one step ago."""
        if sequence.num_pending == 1:
            self._view.decoding.add(sequence)
        else:
            self._view.decoding.discard(sequence.id)
        self._enter_pages([sequence])

    def _enter_pages(self, sequences: list[Sequence]) -> None:
        """Looks at running sequences whose tokens, or a runway of whom, may have entered a page."""
        view = self._view
        size, context_len, forces_parks = view.limits.page_size, view.limits.context_len, view.forces_parks
        for sequence in sequences:
            num_tokens = len(sequence.tokens)
            sequence.next_count_len = view.next_count_len(num_tokens)
            if forces_parks:
                self._await_forced(sequence)
            node = sequence.cache_node
            if node is not None and (num_full := sequence.num_computed // size) > node.depth:
                if sequence.id in self._partly_told:
                    num_full = self._next_told(sequence, node.depth, num_full)
                self._register(sequence, num_full)
            if num_tokens > context_len:
                view.oversized[sequence.id] = sequence
            elif num_tokens > len(sequence.pages) * size:
                view.short[sequence.id] = sequence
        self._set_debts(sequences)

    def _await_forced(self, sequence: Sequence) -> None:
        """Its forced park is due, or it is looked at when it is."""
        forced_len = self._view.forced_len(sequence)
        if len(sequence.tokens) >= forced_len:
            self._view.forced[sequence.id] = sequence
        elif forced_len < sequence.next_count_len:
            sequence.next_count_len = forced_len

    def _set_debts(self, sequences: list[Sequence]) -> None:
        debts_of = self._view.debts_of
        more = entry_more = 0
        for sequence in sequences:
            debt, entry_debt = debts_of(sequence)
            more += debt - sequence.debt
            entry_more += entry_debt - sequence.entry_debt
            sequence.debt, sequence.entry_debt = debt, entry_debt
        self._view.debt += more
        self._view.entry_debt += entry_more

    def have_pages(self, rows: Rows) -> bool:
        """Gives every decode row of `rows`, to run behind the step that runs, its page. False: one finds none."""
        size = self._view.limits.page_size
        starts = zip(rows.sequences, rows.starts, strict=True)
        return self._add_pages([sequence for sequence, start in starts if start >= len(sequence.pages) * size])

    def have_pages_again(self, sequences: list[Sequence]) -> bool:
        """The same for all of those who decode in the step that runs."""
        size = self._view.limits.page_size
        candidates = self._visits.next() if sequences is self._visits.sequences else sequences
        return self._add_pages([each for each in candidates if len(each.tokens) >= len(each.pages) * size])

    def _add_pages(self, sequences: list[Sequence]) -> bool:
        """One for each, or none at all."""
        if len(sequences) > self._view.pool.num_available:
            return False
        view = self._view
        for sequence in sequences:
            page = view.pool.grow(sequence.pages[-1])
            if page is None:
                self._extend(sequence, len(sequence.pages) + 1)
            else:
                sequence.pages.append(page)
            if sequence.debt:
                sequence.debt -= 1
                view.debt -= 1
            if sequence.entry_debt:
                sequence.entry_debt -= 1
                view.entry_debt -= 1
        return True

    def step_done(self, rows: Rows, picked: Items[int]) -> None:
        """The tokens of `rows` are computed; `picked` has the next one of each row that samples."""
        sequences = rows.sequences
        if sequences is self._visits.sequences and sequences is self._view.decoding.sequences:
            self._decoded(sequences, picked)
        else:  # somebody came or went, or the step before this one was not of the same rows
            self._row_by_row(rows, picked)
            self._visits = Visits(sequences)

    def _decoded(self, sequences: list[Sequence], picked: Items[int]) -> None:
        """The steady state, and all that it costs."""
        due = self._visits.advance()
        for sequence, token in zip(sequences, picked, strict=True):
            sequence.tokens.append(token)
            sequence.num_computed += 1
        self._enter_pages(due)
        self._visits.add(due)

    def _row_by_row(self, rows: Rows, picked: Items[int]) -> None:
        tokens = iter(picked)
        decoding = self._view.decoding.by_id
        for sequence, start, length, samples in rows.columns():
            token = next(tokens) if samples else None
            if token is not None and sequence.id in decoding:
                sequence.tokens.append(token)
                sequence.num_computed = start + 1
                if len(sequence.tokens) >= sequence.next_count_len:
                    self._enter_pages([sequence])
            elif sequence.state is State.RUNNING:
                self._advance(sequence, start + length, token)

    def _advance(self, sequence: Sequence, num_computed: int, token: int | None) -> None:
        """A prompt chunk, or a row whose token nobody wants."""
        sequence.num_computed = num_computed
        if token is not None:
            sequence.tokens.append(token)
        self._look_at(sequence)

    def adopt(self, sequence: Sequence, chain: list[Node], num_pages: int) -> list[Node]:
        """Up to `num_pages` in all, it takes the pages that those bring who were restored just before it (R11).
        `chain`: what it holds. Returns what it holds then.
        """
        if len(chain) < num_pages:
            whole = self._view.cache.match(sequence.tokens, num_pages, with_filling=True)
            sequence.pages += self._view.cache.take(whole[len(chain) :])
            chain = whole
        assert len(chain) == num_pages, f"{sequence} shares {len(chain)} pages of {num_pages}"
        return chain

    def reserve(self, sequence: Sequence, chain: list[Node]) -> None:
        """Beside the pages of `chain`, which it holds: all that its tokens and its runway want (R12a)."""
        self._extend(sequence, self._view.wanted_pages(sequence, self._view.entry_runway))
        sequence.cache_node = chain[-1] if chain else self._view.cache.root

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        """Pages up to `num_pages` in all, evicting cached prompts for them where none is free."""
        count = num_pages - len(sequence.pages)
        if count <= 0:
            return
        pool = self._view.pool
        after = sequence.pages[-1] if sequence.pages else None
        if pool.num_free < count or (pool.num_cached and pool.num_lacking(count, after)):
            self._evict(count, after)
        sequence.pages += pool.allocate(count, after)

    def _evict(self, count: int, after: int | None) -> None:
        """So many pages come free, and some more where there are: if cached prompts gave way page by page, sequences
        that grow side by side would take turns in each gap, and lie in as many pieces as they have pages (R16). For the
        same reason whole blocks come free, should that take some pages more.
        """
        view = self._view
        pool, limits = view.pool, view.limits
        ahead = len(view.running) * self.evicted_ahead // limits.page_size
        ahead = min(ahead, limits.num_pages // 16, EVICTED_AT_ONCE)
        wanted = max(0, count - pool.num_free)
        lacking = pool.num_lacking(count, after)
        most = wanted + lacking + ahead
        num_pages = max(wanted + ahead, lacking)
        while num_pages := min(num_pages, most, pool.num_cached):
            self.num_evicted += len(view.cache.evict(num_pages))
            most -= num_pages
            num_pages = pool.num_lacking(count, after)

    def release(self, sequence: Sequence, start: int = 0) -> None:
        """Lets go of the pages from `start` on."""
        self._view.cache.let_go(self._view.pool.release(sequence.pages[start:]))
        del sequence.pages[start:]

    def announce(self, sequence: Sequence) -> None:
        """Those who come back after it may take the pages that its restore fills."""
        if self._view.match_limit(sequence):
            self._register(sequence, self._num_in_common(sequence), is_filling=True)

    def _num_in_common(self, sequence: Sequence) -> int:
        """How many of its full pages another begins with as well who has not ended; all of them, if one has said so far
        what it says, and may go on like that.
        """
        size, found = self._view.limits.page_size, 0
        for other in self._view.live.values():
            if other is sequence:
                continue
            num_tokens = len(other.tokens)
            num_pages = min(sequence.num_computed, num_tokens) // size
            found = num_common_pages(other.tokens, sequence.tokens, size, num_pages, beyond=found)
            is_behind = found >= num_pages and num_tokens < sequence.num_computed
            if is_behind and other.tokens == sequence.tokens[:num_tokens]:
                return sequence.num_computed // size
        return found

    def _next_told(self, sequence: Sequence, num_told: int, num_full: int) -> int:
        """How many of its full pages the prompt cache is to know of now; it knows `num_told`."""
        if num_full > num_told + TOLD_AT_ONCE:
            return num_told + TOLD_AT_ONCE
        self._partly_told.discard(sequence.id)
        return num_full

    def _register(self, sequence: Sequence, num_full: int, *, is_filling: bool = False) -> None:
        """Tells the prompt cache which pages are full, or will be."""
        view, node = self._view, sequence.cache_node
        if node is not None:
            if view.calm is not None and node.page in view.calm.ends:
                view.calm = None
            sequence.cache_node = view.cache.register(
                node, sequence.tokens, sequence.pages, num_full, is_filling=is_filling
            )

    def allocate_rows(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Gives `sequences`, which have rows, their pages; a prompt's were reserved when it entered. Returns those that
        found none.
        """
        view, short = self._view, self._view.short
        if not short:
            return []
        missing: list[Sequence] = []
        is_enough = view.debt <= view.pool.num_available  # for every one that is short: no need to look at all
        for sequence in list(short.values()) if is_enough else [each for each in sequences if each.id in short]:
            needed = -(-len(sequence.tokens) // view.limits.page_size)
            if needed - len(sequence.pages) <= view.pool.num_available:
                self._extend(sequence, needed)
                del short[sequence.id]
                self._set_debts([sequence])
            else:
                missing.append(sequence)
        return missing
