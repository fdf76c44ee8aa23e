"""A parked client hears from the server every two seconds, however busy it is with others (R27, R28)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import Transcript, stream
from tests.e2e.server import Server, running

pytestmark = pytest.mark.xdist_group("keepalive")

PARK_S = 10.8
KEEPALIVE_S = 2.0
SLACK_S = 0.7
PARKED, RESUMED, KEEPALIVE = ": preempted", ": resumed", ": preempt-keepalive"


def long_prompt(first: int, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": [first + position for position in range(num_tokens)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def scene(server: Server) -> tuple[Transcript, Transcript]:
    """Two long sequences fill the pool; the smaller is parked until the client of the larger one hangs up."""
    small, large = Transcript(), Transcript()

    def has_seen_enough(_: Transcript) -> bool:
        parked = small.times(PARKED)
        return bool(parked) and large.lines[-1][0] > parked[0] + PARK_S

    async with asyncio.TaskGroup() as group:
        path = "/v1/completions"
        group.create_task(
            stream(server, long_prompt(2000, 3100, 3000), path=path, transcript=large, stop_when=has_seen_enough)
        )
        group.create_task(stream(server, long_prompt(9000, 2950, 200), path=path, transcript=small))
    return small, large


def test_keepalives_come_on_time_through_a_long_park_on_a_busy_server() -> None:
    with running("--ctx-size", "6144", "--parallel", "2") as server:
        small, large = asyncio.run(scene(server))
        server.wait_until_idle()
    assert small.notices == [PARKED, RESUMED]
    assert small.finish_reasons == ["length"] and small.completion_tokens == 200 and small.is_done
    assert large.notices == [], "the one furthest along is never parked"
    parked_at, resumed_at = small.times(PARKED)[0], small.times(RESUMED)[0]
    assert resumed_at - parked_at > PARK_S - SLACK_S
    lines_meanwhile = [line for at, line in large.lines if parked_at < at < resumed_at and line.startswith("data: ")]
    assert len(lines_meanwhile) > 20, "the server was not busy with the other stream"
    expected = [parked_at + KEEPALIVE_S * count for count in range(1, int((resumed_at - parked_at) / KEEPALIVE_S) + 1)]
    assert len(expected) >= 5
    assert small.times(KEEPALIVE) == [pytest.approx(at, abs=SLACK_S) for at in expected]
