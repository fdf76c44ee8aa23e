"""The running sequences that have one token to compute: those who decode.

In the steady state nobody comes or goes between two steps. Whoever keeps something for all of them from one step to the
next, so as not to look at each of them again, has to know when that is out of date, and `sequences` says so: it is one
and the same list until somebody comes or goes, and never that list again. While it `is` the list that was seen before,
each of them has run on in between, in its slot and on its pages, to which some may have been added.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyserve.sequence import Sequence


class Decoding:
    """By id, in the order in which they came."""

    __slots__ = ("_sequences", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[int, Sequence] = {}
        self._sequences: list[Sequence] | None = None

    @property
    def sequences(self) -> list[Sequence]:
        """All of them. Not to be changed."""
        if self._sequences is None:
            self._sequences = list(self.by_id.values())
        return self._sequences

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, sequence: Sequence) -> None:
        """Harmless when repeated."""
        if sequence.id not in self.by_id:
            self.by_id[sequence.id] = sequence
            self._sequences = None

    def discard(self, id: int) -> None:
        if self.by_id.pop(id, None) is not None:
            self._sequences = None


class Visits:
    """When each of some sequences that decode together is to be looked at next: at `next_count_len` tokens.

    All of them get one token a step, so that the step is known beforehand, and in most steps nobody is looked at.
    """

    __slots__ = ("_by_step", "_step", "sequences")

    def __init__(self, sequences: list[Sequence]) -> None:
        """Costs nothing yet: they may not stay together for long."""
        self.sequences = sequences
        self._by_step: dict[int, list[Sequence]] | None = None
        self._step = 0

    def next(self) -> list[Sequence]:
        """Those that are looked at once each has its next token."""
        if self._by_step is None:
            self._by_step = {}
            self.add(self.sequences)
        return self._by_step.get(self._step + 1, [])

    def advance(self) -> list[Sequence]:
        """Each has its next token. Returns those to look at; add them again when their `next_count_len` is set."""
        due = self.next()
        assert self._by_step is not None
        self._step += 1
        self._by_step.pop(self._step, None)
        return due

    def add(self, sequences: Iterable[Sequence]) -> None:
        by_step, step = self._by_step, self._step
        assert by_step is not None
        for each in sequences:
            by_step.setdefault(step + each.next_count_len - len(each.tokens), []).append(each)
