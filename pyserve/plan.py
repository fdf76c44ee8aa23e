"""The plan: a record of what one engine iteration does. The planner makes it, the ledger carries it out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

if TYPE_CHECKING:
    from pyserve.sequence import Sequence, Tier

ParkReason = Literal["pool_full", "rotation", "last_resort", "forced"]
FailureReason = Literal["never_fits", "pool_full"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner works within. Pages and slots are counts, `batch_tokens` prompt tokens a step."""

    num_pages: int
    page_size: int  # cells in a page
    num_slots: int
    batch_tokens: int = 512
    runway_steps: int = 8  # decode steps that stay clear ahead of the pool filling
    rotation_delay_ms: float = 2000.0
    starved_parks: int = 3
    is_parking_on: bool = True
    is_planner_on: bool = True  # off: pressure is met by the last resort alone
    is_async: bool = True
    preempt_every: int = 0  # park each generating sequence every so many tokens; 0: never
    max_queue: int = 1024  # sequences that may wait

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "num_slots", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("runway_steps", "rotation_delay_ms", "starved_parks", "preempt_every", "max_queue"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def context_len(self) -> int:
        """Tokens that one sequence can hold when it has the pool to itself."""
        return self.num_pages * self.page_size


class Row(NamedTuple):
    """Positions [start, start + length) of one sequence. `samples`: its last token's logits pick the next token."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


_row = partial(tuple.__new__, Row)  # past the named tuple's slow constructor


class Rows(Items[Row]):
    """The rows of a step, kept as columns: every step plans hundreds of them, and a `Row` is made when somebody reads
    it. `columns` is the quick way to read them all. Nobody but who makes them changes them.
    """

    __slots__ = ("_first_starts", "_num_steps", "lengths", "samples", "sequences")

    def __init__(self, decoding: Iterable[Sequence] = ()) -> None:
        """Decode rows of these sequences: one token each."""
        self._set_decoding(list(decoding))

    def _set_decoding(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self._first_starts = [each.num_computed for each in sequences]
        self._num_steps = 0  # steps since rows with those starts
        self.lengths = [1] * len(sequences)
        self.samples = [True] * len(sequences)

    @classmethod
    def of(cls, sequences: list[Sequence]) -> Rows:
        """Decode rows of these sequences, with that list itself as their column. No row is added to them."""
        rows = cls()
        rows._set_decoding(sequences)
        return rows

    def behind(self) -> Rows:
        """The decode rows of the same sequences behind these, which are decode rows, too."""
        rows = Rows()
        rows.sequences, rows.lengths, rows.samples = self.sequences, self.lengths, self.samples
        rows._first_starts, rows._num_steps = self._first_starts, self._num_steps + 1
        return rows

    @property
    def starts(self) -> list[int]:
        """Worked out when somebody asks; in the steady state nobody does."""
        if self._num_steps:
            self._first_starts = [start + self._num_steps for start in self._first_starts]
            self._num_steps = 0
        return self._first_starts

    def following(self, places: list[int]) -> Rows:
        """The decode rows behind those at `places`."""
        rows = Rows()
        starts = self.starts
        rows.sequences = [self.sequences[place] for place in places]
        rows._first_starts = [starts[place] + self.lengths[place] for place in places]
        rows.lengths = [1] * len(places)
        rows.samples = [True] * len(places)
        return rows

    def add_decoding(self, sequences: Iterable[Sequence]) -> None:
        """Decode rows of these, too."""
        other = Rows(sequences)
        self.sequences += other.sequences
        self.starts.extend(other.starts)
        self.lengths += other.lengths
        self.samples += other.samples

    def add(self, sequence: Sequence, start: int, length: int, samples: bool) -> None:
        self.sequences.append(sequence)
        self.starts.append(start)
        self.lengths.append(length)
        self.samples.append(samples)

    def columns(self) -> Iterator[tuple[Sequence, int, int, bool]]:
        """What a `Row` holds, row by row."""
        return zip(self.sequences, self.starts, self.lengths, self.samples, strict=True)

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Row]:
        return map(_row, self.columns())

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and list(self.columns()) == list(other.columns())

    __hash__ = None  # type: ignore[assignment]  # like a list's


@dataclass(frozen=True, slots=True)
class Park:
    """`tier` RAM or DISK: copy the first ceil(num_computed / page_size) pages there. RECOMPUTE: no copy, parked at
    once.
    """

    sequence: Sequence
    reason: ParkReason
    tier: Tier


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring a sequence back. Tier RAM or DISK: copy the parked pages back, all but the first `cached_pages`.

    Those are in the pool already, shared with whoever holds them, and must not be written. With tier RECOMPUTE
    there is no copy: the sequence runs at once, as a prompt. `tier` is the one it was parked in, or
    RECOMPUTE where that is quicker.
    """

    sequence: Sequence
    tier: Tier
    cached_pages: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Give a waiting sequence a slot; its first `cached_pages` pages come from the prompt cache."""

    sequence: Sequence
    slot: int
    cached_pages: int


@dataclass(frozen=True, slots=True)
class Failure:
    """End a sequence: it can never fit (R8), or the pool is full and parking is off (R25)."""

    sequence: Sequence
    reason: FailureReason


@dataclass(frozen=True, slots=True)
class Plan:
    """What one iteration does, in this order. `rows`: decode rows, then prompt chunks; a sequence appears once.

    `must_wait_for_copy`: no row can run before a copy that is in flight lands. A plan without rows that does not
    say so (a park without a copy) is followed by the next plan at once.
    """

    num_evictions: int = 0
    parks: tuple[Park, ...] = ()
    restores: tuple[Restore, ...] = ()
    admissions: tuple[Admission, ...] = ()
    failures: tuple[Failure, ...] = ()
    rows: Rows = field(default_factory=Rows)
    must_wait_for_copy: bool = False
    rotation_head: Sequence | None = None  # the parked one that room is made for; it comes back before all others
    refused_rotation: Sequence | None = None  # the parked head, once per park, when no tier could hold a second one

    @property
    def has_nothing_but_parks(self) -> bool:
        """Whether nothing is to be done beside parks and rows."""
        return not (self.restores or self.admissions or self.failures or self.refused_rotation)

    @property
    def moved(self) -> list[Sequence]:
        """Those that are parked or brought back."""
        return [*(park.sequence for park in self.parks), *(restore.sequence for restore in self.restores)]
