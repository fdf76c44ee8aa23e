"""Page lists -> runs -> combs, so that a park is a handful of copies (R16).

A run is a stretch of pages that follow each other in the pool, upwards or downwards, and in the list. A comb is a row
of upward runs of one length at one stride, in the pool and, back to back, in the list: what sequences growing side by
side leave, and one 2-D copy. A lone run is a comb of one; a downward run is a comb of single pages at stride -1.

This is what the words mean, page by page; the table that a copy reads is made by `ops.comb_table`, which gives the same
combs without a Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Pages start, start + step, ..., `count` of them, at `list_offset` of the page list. `step` is 1 or -1."""

    start: int
    count: int
    step: int
    list_offset: int

    def pages(self) -> range:
        return range(self.start, self.start + self.count * self.step, self.step)


@dataclass(frozen=True, slots=True)
class Comb:
    """`count` runs of `run_pages` adjacent pages, each `stride_pages` behind the one before (negative: ahead of it).

    The runs follow each other in the page list from `list_offset` on.
    """

    start: int
    run_pages: int
    stride_pages: int
    count: int
    list_offset: int

    def pages(self) -> Iterator[int]:
        """The pages in list order."""
        for tooth in range(self.count):
            first = self.start + tooth * self.stride_pages
            yield from range(first, first + self.run_pages)


def runs(pages: Sequence[int]) -> list[Run]:
    """The fewest runs that give `pages` in order: each goes on for as long as it can."""
    result: list[Run] = []
    offset = 0
    while offset < len(pages):
        step = pages[offset + 1] - pages[offset] if offset + 1 < len(pages) else 1
        if step not in (1, -1):
            step = 1
        count = 1
        while offset + count < len(pages) and pages[offset + count] == pages[offset] + count * step:
            count += 1
        result.append(Run(pages[offset], count, step, offset))
        offset += count
    return result


def combs(runs: Sequence[Run]) -> list[Comb]:
    """The runs in list order, upward ones of equal length at one stride joined."""
    result: list[Comb] = []
    index = 0
    while index < len(runs):
        first = runs[index]
        if first.step < 0:
            result.append(Comb(first.start, 1, -1, first.count, first.list_offset))
            index += 1
            continue
        count = _num_joined(runs, index)
        stride = runs[index + 1].start - first.start if count > 1 else first.count
        result.append(Comb(first.start, first.count, stride, count, first.list_offset))
        index += count
    return result


def _num_joined(runs: Sequence[Run], index: int) -> int:
    """How many runs from `index` on, an upward one, are one comb."""
    first = runs[index]
    if index + 1 == len(runs):
        return 1
    stride = runs[index + 1].start - first.start
    count = 1
    while index + count < len(runs):
        run = runs[index + count]
        if run.step < 0 or run.count != first.count or run.start != first.start + count * stride:
            break
        count += 1
    return count
