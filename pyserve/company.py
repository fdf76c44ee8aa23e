"""Those who decode together, and what the engine keeps of them while nobody comes or goes.

A step of the same sequences as the one before costs each of them its token and the event that carries it. All else is
worked out once for all of them: when the first reaches its length, what anybody stops at, who is the longest. They get
one token a step each, so that the length of one of them is a clock for all.

When it is out of date: `Decoding.sequences` is another list as soon as somebody comes or goes, whatever the reason, and
a company belongs to one such list. It is not made before two steps in a row were of that list, for while they end one
after another it would be made for every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from pyserve.generation import put_tokens
from pyserve.ledger import Ledger
from pyserve.plan import Rows
from pyserve.sequence import Sequence
from pyserve.task import Task
from pyserve.types import Token


class Company:
    """Of some sequences all of which have had a token. Nothing in it changes."""

    def __init__(self, sequences: list[Sequence], tasks: Mapping[int, Task]) -> None:
        self.sequences = sequences
        self.tasks = [tasks[each.id] for each in sequences]
        self._generations = [task.generation for task in self.tasks]
        self._indexes = [each.index for each in sequences]
        self._stop_tokens = frozenset().union(*{each.request.stop_tokens for each in sequences})
        self._longest = max(sequences, key=lambda each: len(each.tokens))
        num_steps = min(task.end_len - len(task.sequence.tokens) for task in self.tasks)
        self._end_len = len(sequences[0].tokens) + num_steps  # of the first one, when somebody is at the end

    @property
    def longest_len(self) -> int:
        """Tokens of the longest of them."""
        return len(self._longest.tokens)

    @property
    def do_all_go_on(self) -> bool:
        """Whether all want another token after the next one, if that is not one to stop at."""
        return len(self.sequences[0].tokens) + 1 < self._end_len

    def has_ending(self, picked: Items[int]) -> bool:
        """Whether somebody ends by these tokens, which they have got."""
        return len(self.sequences[0].tokens) >= self._end_len or not self._stop_tokens.isdisjoint(picked)

    def hand_over(self, picked: Items[int]) -> None:
        """Queue their tokens for their clients."""
        put_tokens(self._generations, map(Token, self._indexes, picked))


class Companies:
    """Knows whether one step was of the same sequences as the step before it."""

    def __init__(self, ledger: Ledger, tasks: Mapping[int, Task]) -> None:
        self._ledger = ledger
        self._tasks = tasks
        self._sequences: list[Sequence] = []  # of the step that ended last
        self.latest: Company | None = None  # theirs, if it was the second of them at least

    def of(self, rows: Rows) -> Company | None:
        """Of the step that has ended, if its rows are of those who had a token by the last step and decode now."""
        is_again = rows.sequences is self._sequences
        self._sequences = rows.sequences
        if not is_again or rows.sequences is not self._ledger.decoding:
            self.latest = None
        elif self.latest is None:
            self.latest = Company(rows.sequences, self._tasks)
        return self.latest
