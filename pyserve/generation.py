"""What a caller holds of a request in the engine: its events, as they come, and the way to call it off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable

from pyserve.types import Event, Failed, Finished, Token


class Generation:
    """The events of one request's sequences. The engine puts, one consumer takes; both on one event loop."""

    def __init__(self, num_sequences: int, on_cancel: Callable[[int, bool], None]) -> None:
        """`on_cancel`: told the index of a sequence of which nobody wants more, and whether its answer is complete."""
        self._open = set(range(num_sequences))
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_cancel = on_cancel
        self._deadline = math.inf  # of the wait that is on, or was last
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf  # when it fires

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and every event was taken."""
        return not self._open and not self._events

    def put(self, event: Event) -> None:
        """Queue one event; never waits. Events of a sequence that has ended or was cancelled are dropped."""
        if event.index not in self._open:
            return
        if type(event) is not Token and isinstance(event, Finished | Failed):
            self._open.discard(event.index)
        self._events.append(event)
        if self._waiter is not None:
            self._wake()

    async def next_events(self, deadline: float = math.inf) -> list[Event]:
        """All queued events; waits for the first until `deadline` (loop.time()).

        Empty: the deadline passed, or it is over.
        """
        if not self._events and self._open:
            self._deadline = deadline
            if deadline < self._timer_at:
                self._set_timer(deadline)
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            await waiter
        events, self._events = self._events, []
        if not self._open:
            self._stop_timer()
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._iterate()

    def cancel(self, index: int | None = None) -> None:
        """End one sequence, or all. Idempotent; no further event follows for it."""
        for each in tuple(self._open) if index is None else (index,):
            self._drop(each, is_complete=False)
        self._wake()

    def complete(self, index: int) -> None:
        """The same for one whose answer ends with what was taken so far: the engine counts it as finished."""
        self._drop(index, is_complete=True)
        self._wake()

    def _drop(self, index: int, *, is_complete: bool) -> None:
        if index in self._open:
            self._open.discard(index)
            self._events = [event for event in self._events if event.index != index]
            self._on_cancel(index, is_complete)
        if not self._open:
            self._stop_timer()

    async def _iterate(self) -> AsyncIterator[Event]:
        while not self.is_over:
            for event in await self.next_events():
                yield event

    def _set_timer(self, deadline: float) -> None:
        """One timer serves many waits: it is only ever set anew when it fires, or when a deadline comes closer."""
        self._stop_timer()
        self._timer, self._timer_at = asyncio.get_running_loop().call_at(deadline, self._on_timer), deadline

    def _on_timer(self) -> None:
        self._stop_timer()
        if self._waiter is None or self._deadline == math.inf:
            return
        if self._deadline <= asyncio.get_running_loop().time():
            self._wake()
        else:
            self._set_timer(self._deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def put_tokens(generations: Iterable[Generation], tokens: Iterable[Token]) -> None:
    """`put` of a token to each of these generations, which may repeat: a step has hundreds, and a call for each costs
    more than all that it does.
    """
    for generation, token in zip(generations, tokens, strict=True):
        if token.index in generation._open:
            generation._events.append(token)
            if generation._waiter is not None:
                generation._wake()
