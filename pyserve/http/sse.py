"""Server-sent events: data frames, and the comments that tell a client of parks and restores (R27, R28).

A comment is one line and no blank line after it: a blank line ends an event, and a known client takes the empty
event for data. Keepalives and pings run to absolute deadlines, which traffic does not move: the keepalive of a parked
sequence comes however busy the server, or another sequence of the same request, is.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Content-Type": "text/event-stream; charset=utf-8"}
RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
DONE = b"data: [DONE]\n\n"
PING = b":\n"
KEEPALIVE_INTERVAL_S = 2.0


def frame(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Notices:
    """The comments of one stream. Times in seconds on the event loop's clock."""

    def __init__(self, is_on: bool, ping_interval_s: float, now: float) -> None:
        self._is_on = is_on
        self._ping_interval_s = ping_interval_s if is_on and ping_interval_s > 0 else math.inf
        self._keepalive_interval_s = min(KEEPALIVE_INTERVAL_S, self._ping_interval_s)
        self._parked: set[int] = set()
        self._ping_at = now + self._ping_interval_s
        self._keepalive_at = math.inf

    @property
    def deadline(self) -> float:
        """When `due` or `ping` next has something to say; infinity: never, as things are."""
        ping_at, keepalive_at = self._ping_at, self._keepalive_at
        return ping_at if ping_at < keepalive_at else keepalive_at

    def preempted(self, index: int, now: float) -> bytes:
        """The sequence was parked."""
        if not self._is_on:
            return b""
        if not self._parked:
            self._keepalive_at = now + self._keepalive_interval_s
        self._parked.add(index)
        return _comment("preempted", index)

    def resumed(self, index: int) -> bytes:
        """The sequence runs again. The keepalive goes on for those still parked."""
        self.ended(index)
        return _comment("resumed", index) if self._is_on else b""

    def ended(self, index: int) -> None:
        """The sequence is over, parked or not."""
        self._parked.discard(index)
        if not self._parked:
            self._keepalive_at = math.inf

    def due(self, now: float) -> bytes:
        """Keepalives whose time has come."""
        if now < self._keepalive_at:
            return b""
        missed = math.floor((now - self._keepalive_at) / self._keepalive_interval_s)
        self._keepalive_at += (missed + 1) * self._keepalive_interval_s
        return b"".join(_comment("preempt-keepalive", index) for index in sorted(self._parked))

    def ping(self, now: float) -> bytes:
        """A ping if nothing was written for the ping interval."""
        return PING if now >= self._ping_at else b""

    def wrote(self, now: float) -> None:
        """Something went out."""
        self._ping_at = now + self._ping_interval_s


def _comment(text: str, index: int) -> bytes:
    return f": {text} {index}\n".encode() if index else f": {text}\n".encode()
