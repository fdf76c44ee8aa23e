"""What a part of the check hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class NotHere(Exception):
    """The part needs something that this machine lacks; one line that says what."""


@dataclass
class Goal:
    """A measured number beside what it should be."""

    name: str
    value: float
    unit: str
    target: float
    is_lower_better: bool

    def is_met(self) -> bool:
        return self.value <= self.target if self.is_lower_better else self.value >= self.target


@dataclass
class Result:
    """`summary`: one short line for the table. `data` goes to the JSON."""

    summary: str
    goals: list[Goal] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def check(is_good: bool, what: str) -> None:
    if not is_good:
        raise AssertionError(what)
