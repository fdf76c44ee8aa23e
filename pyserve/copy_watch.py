"""Waits for copies beside the event loop.

The oldest copy need not be the first to end: one waits for the disk, another has come in between, a third hangs. So the
thread that waits looks at all of them, and at those that were posted since it began.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyserve.park import Parking

_WAIT_S = 1.0
_LOOK_S = 0.002  # how often a wait for the oldest looks at the others


class CopyWatch:
    """One worker thread that waits for the copies of one `Parking`, for one event loop."""

    def __init__(self, parking: Parking) -> None:
        self._parking = parking
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pyserve-copy-wait")
        self._waiting: asyncio.Future[None] | None = None  # what the thread is at

    async def wait(self, until: asyncio.Future[Any] | None = None) -> None:
        """Until a copy may have ended, or `until` is done; a second at most."""
        if self._waiting is None or self._waiting.done():
            loop = asyncio.get_running_loop()
            self._waiting = loop.run_in_executor(self._thread, wait_any, self._parking, _WAIT_S)
        futures = [self._waiting] if until is None else [self._waiting, until]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if self._waiting.done():
            self._waiting.result()

    def close(self) -> None:
        self._thread.shutdown()


def wait_any(parking: Parking, timeout_s: float) -> None:
    """Block until a copy has ended or is overdue, host memory has become ready, or the time is over."""
    until_s = time.monotonic() + timeout_s
    while not _has_anything_ended(parking, until_s):
        pass


def _has_anything_ended(parking: Parking, until_s: float) -> bool:
    """Waits for the oldest copy, a little, and looks at the others; also whether the time is over."""
    copies = parking.copies
    left_s = min((until_s, *(copy.deadline_s for copy in copies if copy.result is None))) - time.monotonic()
    if left_s <= 0:
        return True
    posted = [copy for copy in copies if not copy.is_queued]
    if any(copy.wait(0.0) for copy in posted[1:]):
        return True
    left_s = min(left_s, _LOOK_S)
    if not posted:
        return parking.arena.wait(left_s)
    return posted[0].wait(left_s) or (parking.arena.is_growing and parking.arena.wait(0.0))
