"""The planner's choices that the requirements leave open, as keys to sort by; the least comes first.

The defaults are what is shipped. tools/policy_sim.py puts others in their place and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyserve.pool import Pool
from pyserve.sequence import Sequence

RestoreKey = tuple[float, float, int]


def fewest_own_pages(pool: Pool, sequence: Sequence) -> float:
    """Pages that others share free nothing, so they do not count (R4)."""
    return pool.num_own(sequence.pages)


def restore_order(sequence: Sequence) -> RestoreKey:
    """Most parked first, then longest parked (R6)."""
    return (-sequence.num_parks, sequence.parked_at_ms or 0.0, sequence.id)


@dataclass(frozen=True, slots=True)
class Policy:
    """`victim`: among those that are not the leader, the starved last, whom to park first. `restore`: who comes back
    first. `admission`: who waits at the head; None: who came first. `max_passed`: how many of the waiting, at most, are
    looked at behind one that does not fit, and may pass it. `predicted_tokens`: the answer that admission keeps room
    for, its own and those of everybody who runs; 0: nothing beyond the runway.
    """

    victim: Callable[[Pool, Sequence], float] = fewest_own_pages
    restore: Callable[[Sequence], RestoreKey] = restore_order
    admission: Callable[[Sequence], float] | None = None
    max_passed: int = 256
    predicted_tokens: int = 0
