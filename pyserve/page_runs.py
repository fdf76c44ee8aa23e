"""Page lists -> runs -> combs, so that a park is a handful of copies (R16).

A run is a stretch of pages that follow each other in the pool, upwards or downwards, and in the list. A comb is a row
of upward runs of one length at one stride, in the pool and, back to back, in the list: what sequences growing side by
side leave, and one 2-D copy. A lone run is a comb of one; a downward run is a comb of single pages at stride -1.

`runs` and `combs` say it page by page; `comb_table` gives the same combs as the table that a copy reads, without a
Python object per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


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


def comb_table(pages: Sequence[int] | Ints, first_offset: int = 0) -> Ints:
    """The combs of `pages`: int32 [combs, 5], each start, run_pages, stride_pages, count, list_offset. The first page
    has the list offset `first_offset`.

    An int32 array is not copied; of a list, the conversion is most of the cost.
    """
    array = pages if isinstance(pages, np.ndarray) else np.fromiter(pages, np.int32, len(pages))
    if not array.size:
        return np.empty((0, 5), np.int32)
    steps = array[1:] - array[:-1]
    offsets = _group_starts(steps, (steps == 1) | (steps == -1))
    counts = _lens(offsets, array.size)
    starts = array[offsets]
    is_down = np.zeros(offsets.size, np.bool_)
    is_down[counts > 1] = steps[offsets[counts > 1]] < 0

    strides = starts[1:] - starts[:-1]
    firsts = _group_starts(strides, (counts[1:] == counts[:-1]) & ~is_down[1:] & ~is_down[:-1])
    num_joined = _lens(firsts, starts.size)
    table = np.empty((firsts.size, 5), np.int32)
    table[:, 0] = starts[firsts]
    table[:, 1] = table[:, 2] = counts[firsts]
    table[:, 3] = num_joined
    table[:, 4] = offsets[firsts] + np.int32(first_offset)
    is_comb = num_joined > 1
    table[is_comb, 2] = strides[firsts[is_comb]]
    down = is_down[firsts]
    if down.any():
        table[down, 1:4] = np.stack([np.ones_like(counts), np.full_like(counts, -1), counts], axis=1)[firsts[down]]
    return table


def _lens(starts: Ints, end: int) -> Ints:
    lens = np.empty_like(starts)
    lens[:-1] = starts[1:] - starts[:-1]
    lens[-1] = end - starts[-1]
    return lens


def _group_starts(gaps: Ints, can_join: Flags) -> Ints:
    """Where groups start when each, from the left, takes in elements for as long as the gaps between them are equal
    and can be joined. `gaps` and `can_join` [n - 1] stand between n elements.

    A stretch of equal gaps that follows another directly has its first gap as the border between the two groups, unless
    the other consists of one gap that is a border itself. So stretches of one gap in a row are borders in turn.
    """
    is_border = ~can_join
    if gaps.size > 1:
        is_same = can_join[1:] & can_join[:-1] & (gaps[1:] == gaps[:-1])
        stretches = np.flatnonzero(can_join & ~np.concatenate([[False], is_same]))
        ends = np.flatnonzero(can_join & ~np.concatenate([is_same, [False]])) + 1
        follows = np.concatenate([[False], ends[:-1] == stretches[1:]])[: stretches.size]
        if follows.any():
            is_after_one = follows & np.concatenate([[False], (ends - stretches)[:-1] == 1])
            numbers = np.arange(stretches.size)
            anchor = np.maximum.accumulate(np.where(is_after_one, 0, numbers))
            is_border[stretches[follows[anchor] ^ ((numbers - anchor) % 2 == 1)]] = True
    starts = np.flatnonzero(is_border).astype(np.int32)
    return np.concatenate([np.zeros(1, np.int32), starts + np.int32(1)])
