"""What a caller holds of a request in the engine: its events, as they come, and the way to call it off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pyserve.types import Event, Failed, Finished


class Generation:
    """The events of one request's sequences. The engine puts, one consumer takes; both on one event loop."""

    def __init__(self, num_sequences: int, on_cancel: Callable[[int], None]) -> None:
        self._open = set(range(num_sequences))
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_cancel = on_cancel

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and every event was taken."""
        return not self._open and not self._events

    def put(self, event: Event) -> None:
        """Queue one event; never waits. Events of a sequence that has ended or was cancelled are dropped."""
        if event.index not in self._open:
            return
        if isinstance(event, Finished | Failed):
            self._open.discard(event.index)
        self._events.append(event)
        self._wake()

    async def next_events(self, deadline: float | None = None) -> list[Event]:
        """All queued events; waits for the first until `deadline` (loop.time()).

        Empty: the deadline passed, or it is over.
        """
        if not self._events and self._open:
            await self._wait(deadline)
        events, self._events = self._events, []
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._iterate()

    def cancel(self, index: int | None = None) -> None:
        """End one sequence, or all. Idempotent; no further event follows for it."""
        for cancelled in tuple(self._open) if index is None else (index,):
            if cancelled in self._open:
                self._open.discard(cancelled)
                self._events = [event for event in self._events if event.index != cancelled]
                self._on_cancel(cancelled)
        self._wake()

    async def _iterate(self) -> AsyncIterator[Event]:
        while not self.is_over:
            for event in await self.next_events():
                yield event

    async def _wait(self, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if deadline is None else loop.call_at(deadline, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
