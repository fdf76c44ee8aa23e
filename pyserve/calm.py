"""While chats are parked and nobody has room for them: when the plan of the step before still holds.

A plan looks at everybody who is parked: what it would take to bring each back, beside the room that those who run
leave. Under pressure the answer is the same from step to step for most of the time. So a plan that did nothing is
noted, with all that it depends on, and holds for the steps behind it until one of these changes:

- Who decodes; who is parked, in which tier, and how much of it is computed; and no copy is in flight.
- The room, which may become less, but not more.
- What others have in the pool of a parked one's tokens. It grows only behind the last page that both have, when
  somebody who holds that page makes known the page that follows it (`ends`).
- The time at which room has to be made for the one that comes back first.

Nothing else tells whether one fits: what it takes is counted from its tokens, which stay as they are while it is
parked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyserve.sequence import Sequence, Tier

Standing = list[tuple[int, Tier | None, int]]


def standing(parked: Mapping[int, Sequence]) -> Standing:
    """Of each that is parked: its id, where it is, and how much of it is computed."""
    return [(id, each.tier, each.num_computed) for id, each in parked.items()]


@dataclass(frozen=True, slots=True)
class Calm:
    """A plan that had nothing to do while somebody was parked."""

    decoding: list[Sequence]  # of whom nobody came or went while it is the same list
    parked: Standing
    room: int  # pages that those who run left
    until_ms: float
    ends: frozenset[int]  # for each that is parked, the last page that others hold of its tokens

    def holds(self, decoding: list[Sequence], parked: Mapping[int, Sequence], room: int, now_ms: float) -> bool:
        """Whether a plan would have nothing to do for those who are parked now."""
        is_same = decoding is self.decoding and room <= self.room and now_ms <= self.until_ms
        return is_same and standing(parked) == self.parked
