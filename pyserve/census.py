"""The census: what a ledger has, counted and listed for those who only look."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pyserve.pool import Part
from pyserve.prefix import Node
from pyserve.sequence import Sequence
from pyserve.view import View


class Census:
    """The part of a ledger that changes nothing."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._slots: list[Sequence | None] = [None] * view.limits.num_slots
        self._filling: dict[int, int] = {}  # pages that a restore's copy writes, by sequence id

    @property
    def free_pages(self) -> int:
        return self._view.pool.num_free

    @property
    def cached_pages(self) -> int:
        """Pages that only the prompt cache holds."""
        return self._view.pool.num_cached

    @property
    def cache_map(self) -> bytes:
        """One byte per page, not 0 where the prompt cache knows the page, held or not."""
        return bytes(self._view.pool.is_cached)

    @property
    def transfer_pages(self) -> int:
        """Pages whose only use is a copy in flight, out of them or into them."""
        return self._view.pool.num_leaving + sum(self._filling.values())

    @property
    def held_pages(self) -> int:
        return self._view.pool.num_held - sum(self._filling.values())

    @property
    def num_running(self) -> int:
        return len(self._view.running)

    @property
    def num_waiting(self) -> int:
        return len(self._view.waiting)

    @property
    def num_parked(self) -> int:
        """Parked sequences and those on their way there."""
        return len(self._view.parked) + len(self._view.preempting)

    @property
    def waiting(self) -> deque[Sequence]:
        """In order of arrival; not to be changed."""
        return self._view.waiting

    @property
    def is_idle(self) -> bool:
        """Nobody is here, and no copy is in flight."""
        return not self._view.live and not self._view.departing and not self._view.overdue

    @property
    def is_copying(self) -> bool:
        return self._view.is_copying

    def live(self) -> list[Sequence]:
        """Everybody who has not ended, in order of arrival."""
        return list(self._view.live.values())

    def running(self) -> list[Sequence]:
        return list(self._view.running.values())

    @property
    def decoding(self) -> list[Sequence]:
        """Those who have one token to compute; the same list until somebody comes or goes. Not to be changed."""
        return self._view.decoding.sequences

    def preempting(self) -> list[Sequence]:
        return list(self._view.preempting.values())

    def restoring(self) -> list[Sequence]:
        return list(self._view.restoring.values())

    def departing(self) -> list[Sequence]:
        """Ended, with a copy in flight."""
        return list(self._view.departing.values())

    def parked(self) -> list[Sequence]:
        """In the order in which they come back."""
        return sorted(self._view.parked.values(), key=self._view.policy.restore)

    def sequence_in_slot(self, slot: int) -> Sequence | None:
        return self._slots[slot]

    def known_pages(self, sequence: Sequence) -> list[Node]:
        """Its leading pages as the prompt cache knows them."""
        return self._view.cache.known(sequence.pages)

    def page_parts(self, sequence: Sequence) -> Iterator[Part]:
        """Its pages in their order: long stretches that follow each other, and what lies between."""
        return self._view.pool.parts(sequence.pages)

    def num_common(self, sequence: Sequence) -> int:
        """How many of them others hold or copy out as well."""
        return self._view.cache.num_common(sequence.pages)
