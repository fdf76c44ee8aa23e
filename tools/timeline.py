"""When the tokens of a streamed answer came, when it was parked, and what the times between them were like."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tools.streams import post

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


@dataclass(slots=True)
class Timeline:
    """One stream. Times are time.perf_counter(), in seconds."""

    started_s: float = 0.0
    tokens: list[float] = field(default_factory=list)  # when each piece of text came
    parks: list[int] = field(default_factory=list)  # for each park, how many pieces had come before it
    num_parked: int = 0  # sequences of the stream that are parked now
    error: str = ""
    is_done: bool = False

    def read_line(self, line: bytes, now_s: float) -> None:
        """Take in one line. Nothing is parsed that need not be, as the client shares its machine with the server."""
        if line.startswith(b"data: {"):
            if b'"error"' in line and b'"choices"' not in line:
                self.error = line[6:].decode()
            elif b'"finish_reason":null' in line:
                self.tokens.append(now_s)
        elif line.startswith(b": preempted"):
            self.parks.append(len(self.tokens))
            self.num_parked += 1
        elif line.startswith(b": resumed"):
            self.num_parked -= 1
        elif line == b"data: [DONE]":
            self.is_done = True

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.tokens)]

    def running_gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Those within the given time in which it was not parked."""
        parked = {count - 1 for count in self.parks}
        return [
            after - before
            for number, (before, after) in enumerate(pairwise(self.tokens))
            if number not in parked and before >= begin_s and after <= end_s
        ]


async def follow(url: str, body: Mapping[str, Any], timeline: Timeline) -> None:
    """Ask for a streamed completion and keep its times."""
    timeline.started_s = time.perf_counter()
    async with post(url, "/v1/completions", {**body, "stream": True}) as reply:
        if reply.status != 200:
            timeline.error = (await reply.reader.read()).decode()
            return
        async for line in reply.lines():
            timeline.read_line(line, time.perf_counter())
    if not timeline.is_done:
        timeline.error = timeline.error or "the stream ended without [DONE]"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed. `values` must not be empty."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99, p99.9 and max; None of nothing."""
    return {name: quantile(values, share) if values else None for name, share in SHARES.items()}
