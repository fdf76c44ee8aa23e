"""A client that leaves is noticed at once, streaming or not, waiting or served."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx
import pytest

from pyserve.types import Started
from tests.http.asking import CHAT, USER, loaded_app, raw_call, real_server
from tests.http.fake_engine import FakeEngine, FakeServed, free_port


def endless() -> FakeServed:
    return FakeServed(FakeEngine(token_delay_s=0.005))


BODY = {"messages": USER, "ignore_eos": True, "max_tokens": 100_000, "n": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_every_sequence(stream: bool) -> None:
    served = endless()
    call = asyncio.run(raw_call(loaded_app(served), {**BODY, "stream": stream}, leaves_after_s=0.1))
    assert call.took_s < 0.5 and sorted(served.engine.cancelled) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_waiting_for_a_slot_cancels(stream: bool) -> None:
    served = FakeServed(FakeEngine(script=lambda index, request: [30.0, Started(index, 0)]))
    call = asyncio.run(raw_call(loaded_app(served), {**BODY, "stream": stream}, leaves_after_s=0.1))
    assert call.took_s < 0.5 and sorted(served.engine.cancelled) == [0, 1]
    assert call.sent == []


def test_leaving_after_the_answer_cancels_nothing() -> None:
    served = FakeServed()
    call = asyncio.run(raw_call(loaded_app(served), {"messages": USER, "stream": True}, leaves_after_s=0.3))
    assert call.body.endswith(b"data: [DONE]\n\n") and served.engine.cancelled == []
    assert call.took_s < 0.25


def wait_until(condition: Any, timeout_s: float = 3.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s
        time.sleep(0.01)
    return time.monotonic() - start


def test_over_real_sockets_closing_and_resetting_free_the_slots() -> None:
    served = endless()
    with real_server(loaded_app(served), free_port()) as url:
        with httpx.stream("POST", url + CHAT, json={**BODY, "stream": True}) as response:
            next(response.iter_lines())
        assert wait_until(lambda: served.engine.num_open == 0) < 1.0
        port = int(url.rsplit(":", 1)[1])
        for resets in (False, True):
            connection = socket.create_connection(("127.0.0.1", port))
            body = httpx.Request("POST", url + CHAT, json=BODY).read()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            wait_until(lambda: served.engine.num_open == 2)
            if resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()
            assert wait_until(lambda: served.engine.num_open == 0) < 1.0
        assert httpx.get(url + "/health").json()["slots_processing"] == 0
    assert len(served.engine.cancelled) == 6


def test_two_hundred_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    served = FakeServed(FakeEngine(token_delay_s=0.001))

    async def run() -> None:
        app = loaded_app(served)
        calls = [
            raw_call(app, {**BODY, "stream": number % 2 == 0, "max_tokens": 50}, leaves_after_s=number / 2000)
            for number in range(200)
        ]
        await asyncio.gather(*calls)
        await asyncio.sleep(0.05)

    served.engine.max_queue = 1000
    asyncio.run(run())
    assert served.engine.num_open == 0
