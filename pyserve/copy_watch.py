"""Waits for copies beside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyserve.park import Parking

_WAIT_S = 1.0


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
            self._waiting = loop.run_in_executor(self._thread, self._parking.wait_any, _WAIT_S)
        futures = [self._waiting] if until is None else [self._waiting, until]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if self._waiting.done():
            self._waiting.result()

    def close(self) -> None:
        self._thread.shutdown()
