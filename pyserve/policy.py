"""The planner's choices that the requirements leave open, as keys to sort by; the least comes first.

The defaults are what is shipped. tools/policy_sim.py puts others in their place and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pyserve.pool import Pool
from pyserve.sequence import Sequence

RestoreKey = tuple[float, float, int]
NUM_PLACES = 32  # whoever is further behind stands in order of arrival, so that a long queue costs little


def fewest_own_pages(pool: Pool, sequence: Sequence) -> float:
    """Pages that others share free nothing, so they do not count (R4)."""
    return pool.num_own(sequence.pages)


def restore_order(sequence: Sequence) -> RestoreKey:
    """Most parked first, then longest parked (R6)."""
    return (-sequence.num_parks, sequence.parked_at_ms or 0.0, sequence.id)


def is_overdue(sequence: Sequence, overdue_ms: float) -> bool:
    """It came to the head of the waiting before then."""
    return sequence.waiting_since_ms is not None and sequence.waiting_since_ms < overdue_ms


@dataclass(frozen=True, slots=True)
class Policy:
    """`victim`: among those that are not the leader, the starved last, whom to park first. `restore`: who comes back
    first. `admission`: who of all the waiting is looked at first; None: in order of their places. `tokens_per_place`:
    so many tokens of a prompt that the prompt cache does not have cost a place in the queue; 0: first come, first
    served, but for the overdue. `max_passed`: how many of the waiting, at most, are looked at behind one that does not
    fit, and may pass it. `predicted_tokens`: the answer that admission keeps room for, its own and those of everybody
    who runs; 0: nothing beyond the runway.
    """

    victim: Callable[[Pool, Sequence], float] = fewest_own_pages
    restore: Callable[[Sequence], RestoreKey] = restore_order
    admission: Callable[[Sequence], float] | None = None
    tokens_per_place: int = 256
    max_passed: int = 256
    predicted_tokens: int = 0

    def queue(self, waiting: Iterable[Sequence], overdue_ms: float) -> Iterator[Sequence]:
        """`waiting`, in order of arrival, as they are looked at: the overdue first, then `NUM_PLACES` by their places,
        so that those who come together are served sooner on average, and nobody is passed by all who come later.
        """
        if self.admission is not None:
            yield from sorted(waiting, key=self.admission)
            return
        arrivals = iter(waiting)
        first = sorted(islice(arrivals, NUM_PLACES), key=self.place)
        heads = [each for each in first if each.waiting_since_ms is not None]
        if any(is_overdue(each, overdue_ms) for each in heads):
            first.sort(key=lambda each: not is_overdue(each, overdue_ms))
        yield from first
        yield from arrivals

    def place(self, sequence: Sequence) -> float:
        """Ids are in order of arrival. Who shares the prompt of another has it for nothing, and a chat that comes back
        has for nothing what was in the prompt cache when it came. That is looked at once: a look at every plan would
        cost a walk through the pages of everybody in the queue.
        """
        if not self.tokens_per_place or sequence.prompt_leader is not None:
            return sequence.id
        return sequence.id + (sequence.prompt_len - sequence.num_known) / self.tokens_per_place
