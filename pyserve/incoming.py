"""The incoming: sequences whose pages a restore's copy is filling, and who shares these pages before they are filled.

Sequences that come back together take what they have in common once (R11): the first fills it, the others share its
pages. They are found like cached prompts are, in the prompt cache, where a restore makes its full pages known at once,
marked as being filled; only restores that copy, too, take such pages, and they are reported after the one that fills
them. If that one only ends meanwhile its copy goes on, and its pages stay with those who share them.

If its copy fails or is overdue, its pages are forgotten, and whoever shares some of them is forsaken: it lets go of all
that it shares at once, keeps the pages that its own copy is writing until that is over, and is then parked again: where
it was, if its own state is good, to come back without the other; else to be computed again. Each time that happens the
one that failed is computed again, so it comes to an end. Nobody ever runs on a page that was not filled.
"""

from __future__ import annotations

from pyserve.residents import Residents
from pyserve.sequence import Sequence, State, Tier
from pyserve.view import View


class Incoming:
    """`num_filling`: how many of its last pages a sequence's copy fills, by sequence id. The ledger calls this, nobody
    else.
    """

    def __init__(self, view: View, residents: Residents, num_filling: dict[int, int]) -> None:
        self._view = view
        self._residents = residents
        self._num_filling = num_filling
        self._num_computed: dict[int, int] = {}  # of those forsaken: the tokens in their parked state, by sequence id

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._num_filling

    def begin(self, sequence: Sequence, num_shared: int) -> None:
        """A copy fills all its pages but the first `num_shared`."""
        self._num_filling[sequence.id] = len(sequence.pages) - num_shared
        self._residents.announce(sequence)

    def filled(self, sequence: Sequence) -> None:
        """Its copy has landed, as have those whose pages it shares."""
        assert not self.is_forsaken(sequence), f"{sequence} shares pages that were not filled"
        self._view.cache.filled(self._split(sequence)[1])
        del self._num_filling[sequence.id]

    def num_parked(self, sequence: Sequence) -> int:
        """The tokens in the parked state of one that is forsaken."""
        return self._num_computed.pop(sequence.id, 0)

    def not_filled(self, sequence: Sequence) -> int:
        """Its copy has failed, or one whose pages it shares. Returns how many pages it goes on sharing."""
        shared, _ = self._split(sequence)
        self._forget(sequence)
        sequence.cache_node = self._view.cache.last_of(shared)
        del self._num_filling[sequence.id]
        return len(shared)

    def overdue(self, sequence: Sequence) -> None:
        """Its copy is not waited for any more. It is left, as a reader, with the pages that may still be written."""
        self._forget(sequence)
        self._let_go_of_shared(sequence)
        self._view.pool.start_reading(sequence.pages)
        self._num_computed.pop(sequence.id, None)
        del self._num_filling[sequence.id]

    @staticmethod
    def is_forsaken(sequence: Sequence) -> bool:
        """Some of what it shared will not be filled."""
        return sequence.state is State.RESTORING and sequence.tier is Tier.RECOMPUTE

    def _split(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Its pages: those that it shares, and those that its copy fills."""
        num_shared = len(sequence.pages) - self._num_filling[sequence.id]
        return sequence.pages[:num_shared], sequence.pages[num_shared:]

    def _let_go_of_shared(self, sequence: Sequence) -> None:
        shared, sequence.pages = self._split(sequence)
        self._view.cache.let_go(self._view.pool.release(shared))

    def _forget(self, sequence: Sequence) -> None:
        """Nobody finds the pages that were not filled, and all that share them are forsaken."""
        view = self._view
        shared, own = self._split(sequence)
        if not own:
            return
        view.cache.forget(own[0])  # and all that follow it
        for other in [*view.restoring.values(), *view.departing.values()]:
            if other is sequence or other not in self:
                continue
            if self._split(other)[0][len(shared) : len(shared) + 1] == own[:1]:
                self._let_go_of_shared(other)
                self._num_computed[other.id] = other.num_computed
                other.recompute()
