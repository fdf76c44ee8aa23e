"""Copies between pool pages and host memory on a thread of their own, with events.

The meaning is CUDA's: copies of a stream run in the order in which they were posted, each after its fence; an event
answers "is it done" without waiting. A copy keeps the memory at both ends alive until its event is done (R20), and is
refused as a whole, with nothing posted, when it does not fit (R18).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PageRow = NDArray[np.int32]  # page ids in the order of a sequence's pages, as in a row of the page table
PageList = torch.Tensor | PageRow | Sequence[int]


class CopyFailed(RuntimeError):
    """The copy has ended, and not well: nothing of it is under way any more."""


class PageMismatch(CopyFailed):
    """A page in host memory is not what its hash says."""


class CopyEvent:
    """Stands for one posted copy."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def query(self) -> bool:
        """Whether the copy is done. Never waits. Raises CopyFailed when the copy failed."""
        try:
            return bool(self._handle.query())
        except RuntimeError as error:
            raise self._failure(error) from None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits, without the GIL, until the copy is done or the time is over; whether it is done. Raises CopyFailed
        when the copy failed.
        """
        try:
            return bool(self._handle.wait(timeout_s))
        except RuntimeError as error:
            raise self._failure(error) from None

    @property
    def copy_s(self) -> float:
        """Seconds that the copy itself took, the time in the queue left out; 0 until it is done."""
        return float(self._handle.copy_s())

    def _failure(self, error: RuntimeError) -> CopyFailed:
        message = first_line(error)
        return PageMismatch(message) if self._handle.is_mismatch() else CopyFailed(message)


class Fence:
    """Orders copies behind a step: they wait until `signal`. A fence that is dropped without a signal fails the
    copies that wait for it.
    """

    def __init__(self) -> None:
        self._handle = torch.classes.pyserve.Fence()

    def signal(self) -> None:
        """The step is over. Idempotent."""
        self._handle.signal()


class CopyStream:
    """A copy thread with a queue.

    `delay_ms`, `fail_after` (copies that go well before all others fail), `pause` and `resume` are for tests of what
    happens while a copy is in flight.
    """

    def __init__(self, *, delay_ms: float = 0.0, fail_after: int | None = None) -> None:
        self._handle = torch.classes.pyserve.CopyStream(delay_ms, fail_after)
        self._finalizer = weakref.finalize(
            self, self._handle.close
        )  # at the latest when the interpreter ends, so that no copy outlives it

    def copy_pages(
        self,
        pool: torch.Tensor,
        host: torch.Tensor,
        pages: PageList,
        to_host: bool,
        *,
        after: Fence | None = None,
        hashes: torch.Tensor | None = None,
    ) -> CopyEvent:
        """Posts one copy and returns at once.

        `pool` [pages, ...] and `host` uint8 [n * page_bytes], both contiguous. `pages`: page ids, int32 [n], page i
        at place i of `host`; or combs, int32 [m, 5] with start_page, run_pages, stride_pages, count, list_offset.
        `after`: do not start before this fence is signalled. `hashes` int64 [n]: out of the pool, the entries of
        copied pages that are not 0 become these pages' hashes by the time that the event is done; into the pool, they
        are what the pages must hash to, else the copy fails with PageMismatch. Raises ValueError, with nothing
        posted, when nothing would be copied or something reaches past the pool or `host`, and after `close`.
        """
        combs = combs_of(pages)
        return CopyEvent(self._handle.copy_pages(pool, host, combs, to_host, *self._behind(after), hashes))

    def hash_pages(self, host: torch.Tensor, hashes: torch.Tensor) -> None:
        """Give the pages in `host`, uint8 [n * page_bytes], whose entry of `hashes`, int64 [n], is 0 the hash that
        `copy_pages` would have given them. Done when it returns, without the GIL: not for the event loop.
        """
        self._handle.hash_pages(host, hashes, host.numel() // hashes.numel())

    def _behind(self, after: Fence | None) -> tuple[Any, ...]:
        """What the stream in C++ is told of a copy's fence."""
        return (None if after is None else after._handle,)

    def calibrate(self, pool: torch.Tensor) -> None:
        """Learn how this machine copies best, where there are several ways, and log it: tenths of a second. `tuning`
        says what was found. The pool stays as it is.
        """

    @property
    def tuning(self) -> Mapping[str, int]:
        """What `calibrate` has found, by name; nothing where there is one way only."""
        return {}

    def num_outstanding(self) -> int:
        """Copies posted and not done."""
        return int(self._handle.num_outstanding())

    def pause(self) -> None:
        """Holds back copies that have not started. `close` is not held back."""
        self._handle.pause()

    def resume(self) -> None:
        self._handle.resume()

    def close(self) -> None:
        """Waits, without the GIL, for every copy posted, then ends the thread. Idempotent."""
        self._finalizer()


def first_line(error: Exception) -> str:
    """Of what an op raised: torch adds a trace of its own calls."""
    return str(error).split("\n", 1)[0]


def copy_pages(pool: torch.Tensor, host: torch.Tensor, pages: PageList, to_host: bool) -> None:
    """The same copy, done when it returns. Shapes and errors as in `CopyStream.copy_pages`."""
    torch.ops.pyserve.page_copy(pool, host, combs_of(pages), to_host)


def combs_of(pages: PageList) -> torch.Tensor:
    """int32 [m, 5] from a list of pages; combs pass through."""
    is_combs = isinstance(pages, torch.Tensor) and pages.dim() == 2 and pages.shape[1] == 5
    return pages if isinstance(pages, torch.Tensor) and is_combs else comb_table(pages)


def comb_table(pages: PageList, first_offset: int = 0) -> torch.Tensor:
    """The combs of `pages` (page_runs.py) as int32 [m, 5]: start_page, run_pages, stride_pages, count, list_offset. The
    first page has the list offset `first_offset`.
    """
    if not isinstance(pages, torch.Tensor):
        pages = torch.from_numpy(page_row(pages))
    if pages.dim() != 1 or pages.dtype != torch.int32:
        raise ValueError(f"pages must be int32 [n] or combs int32 [m, 5], not {pages.dtype} {list(pages.shape)}")
    table: torch.Tensor = torch.ops.pyserve.comb_table(pages, first_offset)
    return table


def page_row(pages: PageRow | Sequence[int]) -> PageRow:
    """The pages as an array: a row as it is, another sequence of integers as a row of its own.

    Reading 131,072 Python integers takes 2 ms, ten times what is done with them then: who has a row passes it on (R16).
    """
    return pages if isinstance(pages, np.ndarray) else np.fromiter(pages, np.int32, len(pages))
