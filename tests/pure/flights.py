"""Copies that the driver (pool_driver.py) has in flight."""

from __future__ import annotations

from dataclasses import dataclass

from pyserve.sequence import Sequence


@dataclass
class Incoming:
    """A restore in flight. It shares `num_shared` pages, some with the restores `behind`, and fills `pages`."""

    sequence: Sequence
    num_shared: int
    pages: list[int]
    behind: set[int]
    is_forsaken: bool = False  # one of those has failed
    is_lost: bool = False  # and its own state with it

    def key(self) -> tuple[object, ...]:
        return (self.num_shared, tuple(sorted(self.behind)), self.is_forsaken, self.is_lost)


@dataclass
class Overdue:
    """A copy that nobody waits for. It may write to its pages; a park's reads them, and found `content`."""

    pages: list[int]
    content: list[list[int | None]] | None = None
