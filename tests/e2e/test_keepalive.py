"""A parked client hears from the server every two seconds, however busy it is with others (R27, R28)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import TOPICS, Transcript, chat, stream
from tests.e2e.server import Server, running

pytestmark = pytest.mark.xdist_group("keepalive")

PARK_S = 6.6
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


async def small_talk(server: Server, other: Transcript) -> int:
    """Short chats, one after another, until the other stream has resumed; how many."""
    count = 0
    while other.times(RESUMED) == []:
        body = chat(f"{TOPICS[count % 4]} {count}", max_tokens=30, filler="")
        assert (await stream(server, body)).finish_reasons == ["length"]
        count += 1
    return count


async def scene(server: Server) -> tuple[Transcript, Transcript, int]:
    """Two long sequences fill the pool; the smaller is parked until the larger one's client has had enough of it."""
    small, large = Transcript(), Transcript()

    def has_seen_enough(_: Transcript) -> bool:
        parked = small.times(PARKED)
        return bool(parked) and large.lines[-1][0] > parked[0] + PARK_S

    async with asyncio.TaskGroup() as group:
        path = "/v1/completions"
        group.create_task(
            stream(server, long_prompt(2000, 2100, 1900), path=path, transcript=large, stop_when=has_seen_enough)
        )
        group.create_task(stream(server, long_prompt(9000, 1850, 200), path=path, transcript=small))
        while not small.times(PARKED):
            await asyncio.sleep(0.05)
        talks = group.create_task(small_talk(server, small))
    return small, large, talks.result()


def test_keepalives_come_on_time_through_a_long_park_on_a_busy_server() -> None:
    with running("--ctx-size", "4096", "--parallel", "3") as server:
        small, large, num_talks = asyncio.run(scene(server))
        server.wait_until_idle()
    assert small.notices == [PARKED, RESUMED]
    assert small.finish_reasons == ["length"] and small.completion_tokens == 200 and small.is_done
    assert large.notices == [], "the one furthest along is never parked"
    assert num_talks >= 2
    parked_at, resumed_at = small.times(PARKED)[0], small.times(RESUMED)[0]
    assert resumed_at - parked_at > PARK_S - SLACK_S
    expected = [parked_at + KEEPALIVE_S * count for count in range(1, int((resumed_at - parked_at) / KEEPALIVE_S) + 1)]
    assert len(expected) >= 3
    assert small.times(KEEPALIVE) == [pytest.approx(at, abs=SLACK_S) for at in expected]
