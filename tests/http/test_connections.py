"""Connections of a whole server: how long idle ones stay open, what a stop does to them, targets and bodies as sent."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pyserve.__main__ import Server
from pyserve.connection import LoopErrors, raise_descriptor_limit
from pyserve.http import schema
from pyserve.settings import Settings
from tests.http.asking import CHAT, USER
from tests.http.fake_engine import FakeEngine, FakeServed, starter

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(body: Any, path: str = CHAT) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


class Connection:
    """One connection of a client that sends and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self.writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer; all of ours but streams say their length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        lines = head.decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        return int(lines[0].split()[1]), await self.reader.readexactly(length)

    async def is_closed(self) -> bool:
        """Whether the server has closed it, or does so in this moment."""
        try:
            return await asyncio.wait_for(self.reader.read(1), 0.2) == b""
        except TimeoutError:
            return False


class Running:
    """A server in this event loop."""

    def __init__(self, port: int, task: asyncio.Task[int]) -> None:
        self.port, self.task = port, task
        self._connections: list[Connection] = []

    async def connect(self) -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self._connections.append(connection)
        return connection

    async def stop(self, num_signals: int = 1) -> float:
        """Send the signals; the seconds that the server took to end."""
        start = time.monotonic()
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.02)
        assert await asyncio.wait_for(self.task, 20) == 0
        return time.monotonic() - start

    def close(self) -> None:
        for connection in self._connections:
            connection.writer.close()


@asynccontextmanager
async def serving(served: FakeServed | None = None, **settings: Any) -> AsyncIterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = Server(Settings(**settings), listener.detach(), starter(served or FakeServed()))  # type: ignore[arg-type]
    running = Running(port, asyncio.create_task(server.run()))
    try:
        while (await (await running.connect()).ask(GET_HEALTH))[0] != 200:
            await asyncio.sleep(0.01)
        yield running
        if not running.task.done():
            await running.stop()
    finally:
        running.close()


def put_clock_forward(seconds: float) -> None:
    """Timers of this event loop fire as if so much time had passed."""
    loop = asyncio.get_running_loop()
    real = loop.time
    loop.time = lambda: real() + seconds  # type: ignore[method-assign]


def test_an_idle_connection_outlives_the_pools_of_clients_but_not_for_ever() -> None:
    async def run() -> None:
        async with serving() as server:
            connection = await server.connect()
            assert (await connection.ask(GET_HEALTH))[0] == 200
            put_clock_forward(60.0)
            assert not await connection.is_closed()
            assert (await connection.ask(GET_HEALTH))[0] == 200
            put_clock_forward(76.0)
            assert await connection.is_closed()

    asyncio.run(run())


def num_sockets() -> int:
    """That this process has open: the clients' and the server's."""
    links = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(str(each.readlink()).startswith("socket:") for each in links)


def test_a_connection_goes_with_its_client() -> None:
    """Each kept its descriptor until the keep-alive time was over: a scan of ports, and the server took nobody."""

    async def run() -> None:
        async with serving() as server:
            before = num_sockets()
            fresh, used, begun = [[await server.connect() for _ in range(10)] for _ in range(3)]
            for one in used:
                assert (await one.ask(GET_HEALTH))[0] == 200
            for one in begun:
                one.writer.write(GET_HEALTH[:10])
            assert num_sockets() > before + 30
            await asyncio.sleep(0.1)
            for one in (*fresh, *used, *begun):
                one.writer.close()
            deadline = time.monotonic() + 5
            while num_sockets() > before:
                assert time.monotonic() < deadline, f"{num_sockets() - before} connections are left"
                await asyncio.sleep(0.02)

    asyncio.run(run())


def test_connections_that_cannot_be_accepted_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio told each with a traceback: 200 MB a minute."""

    async def run() -> None:
        loop, handler = asyncio.get_running_loop(), LoopErrors()
        for _ in range(1000):
            handler(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "too many")})
        handler(loop, {"message": "a fault of ours", "exception": OSError(5, "broken")})

    asyncio.run(run())
    assert [record.name for record in caplog.records] == ["pyserve.main", "asyncio"]
    assert "ulimit -n" in caplog.messages[0] and "a fault of ours" in caplog.messages[1]


def test_the_server_may_open_as_many_files_as_the_system_lets_it() -> None:
    script = """
import resource
from pyserve.connection import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_a_limit_that_the_system_does_not_raise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refused)
    raise_descriptor_limit()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_stop_ends_idle_connections_at_once(num_signals: int) -> None:
    async def run() -> None:
        async with serving() as server:
            used, fresh, begun = [await server.connect() for _ in range(3)]
            assert (await used.ask(GET_HEALTH))[0] == 200
            begun.writer.write(GET_HEALTH[:10])
            assert await server.stop(num_signals) < 2.0
            assert [await one.is_closed() for one in (used, fresh, begun)] == [True] * 3

    asyncio.run(run())


def test_a_stop_lets_a_running_answer_finish_beside_an_idle_connection() -> None:
    async def run() -> None:
        async with serving(FakeServed(FakeEngine(token_delay_s=0.05))) as server:
            idle, asking = await server.connect(), await server.connect()
            assert (await idle.ask(GET_HEALTH))[0] == 200
            asking.writer.write(post({"messages": USER}))
            await asyncio.sleep(0.1)
            assert await server.stop() < 2.0
            status, body = await asking.answer()
            assert status == 200 and json.loads(body)["choices"][0]["finish_reason"] == "stop"

    asyncio.run(run())


def test_a_body_that_does_not_go_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BODY_SILENCE_S", 0.2)

    async def run() -> None:
        async with serving() as server:
            slow, stalled = await server.connect(), await server.connect()
            stalled.writer.write(post({"messages": USER})[:-5])
            request = post({"messages": USER})
            slow.writer.write(request[:-10])
            for byte in request[-10:]:
                await asyncio.sleep(0.05)
                slow.writer.write(bytes([byte]))
            assert (await slow.answer())[0] == 200
            status, body = await stalled.answer()
            assert status == 408 and json.loads(body)["error"]["code"] == 408 and await stalled.is_closed()

    asyncio.run(run())


@pytest.mark.parametrize("target", ["http://x/health", "http://x:8080/health?a=1", "HTTP://user@x/health", "http://x"])
def test_a_target_may_be_a_whole_url(target: str) -> None:
    async def run() -> None:
        async with serving() as server:
            status, _ = await (await server.connect()).ask(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert status == 200

    asyncio.run(run())


def test_a_whole_url_needs_the_key_that_its_path_needs() -> None:
    async def run() -> None:
        async with serving(api_keys=("secret",)) as server:
            for target, expected in (("http://x/health", 200), ("http://x/slots", 401), ("http://health/slots", 401)):
                request = f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
                assert (await (await server.connect()).ask(request))[0] == expected

    asyncio.run(run())
