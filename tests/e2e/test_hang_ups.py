"""Clients that leave at any moment leave nothing behind (R12, R20)."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from tests.e2e.client import TOPICS, chat, stream, stream_one
from tests.e2e.server import Server, running

pytestmark = pytest.mark.xdist_group("hang-ups")

NUM_VISITS = 200
NUM_AT_ONCE = 8  # twice the slots, so that some leave while they wait for one
LONGEST_VISIT_S = 1.0


async def visit(client: httpx.AsyncClient, url: str, number: int, visit_s: float) -> bool:
    """Ask for a long answer and hang up after a while; whether any byte of an answer had come."""
    body = chat(f"{TOPICS[number % 4]}, number {number}", max_tokens=380, temperature=0.8, seed=number, filler="")
    body["stream"] = number % 2 == 0
    has_answer = False
    try:
        async with asyncio.timeout(visit_s), client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                has_answer = True
    except TimeoutError:
        pass
    return has_answer


async def visits(server: Server) -> int:
    """All visits, some at a time; how many saw a part of their answer."""
    chance = random.Random(20)
    durations = [chance.uniform(0.0, LONGEST_VISIT_S) for _ in range(NUM_VISITS)]
    room = asyncio.Semaphore(NUM_AT_ONCE)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def one(number: int) -> bool:
            async with room:
                return await visit(client, server.url, number, durations[number])

        return sum(await asyncio.gather(*(one(number) for number in range(NUM_VISITS))))


def check_nothing_is_left(server: Server) -> None:
    server.wait_until_idle()
    assert [slot["is_preempted"] for slot in server.slots()] == [False] * 4
    assert server.metric("requests_preempted") == 0
    assert server.metric("preempt_ram_bytes") == 0
    assert server.metric("pool_pages_held") == server.metric("pool_pages_in_transfer") == 0
    pages = server.metric("pool_pages_free") + server.metric("pool_pages_cached")
    assert pages == server.metric("pool_pages") == 512 / 16


def test_two_hundred_clients_hang_up_and_nothing_is_left() -> None:
    question = chat(TOPICS[0], max_tokens=40, filler="")
    with running("--ctx-size", "512", "--parallel", "4", "--preempt-every", "5") as server:
        before = stream_one(server, question)
        num_answered = asyncio.run(visits(server))
        check_nothing_is_left(server)
        assert num_answered > 20, "the visits were too short to mean anything"
        assert server.metric("n_preempt_total") > 20, "hardly anybody was parked"
        assert server.metric("sequences_cancelled_total") > 50
        assert stream_one(server, question).text == before.text


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_slot_is_free_soon_after_its_client_left(is_streamed: bool) -> None:
    with running("--ctx-size", "4096", "--parallel", "1") as server:
        body = {**chat(TOPICS[1], max_tokens=3000, filler=""), "stream": is_streamed}
        assert asyncio.run(freed_after_s(server, body)) < 1.0


async def freed_after_s(server: Server, body: dict[str, object]) -> float:
    """Seconds from hanging up to an idle slot."""
    async with httpx.AsyncClient(timeout=60) as client:
        asking = asyncio.create_task(stream(server, body))
        while not (await client.get(f"{server.url}/slots")).json()[0]["is_processing"]:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left_at = time.monotonic()
        while (await client.get(f"{server.url}/slots")).json()[0]["is_processing"]:
            assert time.monotonic() < left_at + 10, "the slot stays busy"
            await asyncio.sleep(0.01)
        return time.monotonic() - left_at
