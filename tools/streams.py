"""Requests to a running server and what comes back, piece by piece, for the tools that watch it.

HTTP/1.0 is asked for, so that the body ends with its connection and its lines are those that the server wrote.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 24


@dataclass(slots=True)
class Reply:
    """An answer whose head has come."""

    status: int
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        while piece := await self.reader.read(1 << 16):
            yield piece

    async def lines(self) -> AsyncIterator[bytes]:
        """The body line by line, without the newlines."""
        while line := await self.reader.readline():
            yield line.rstrip(b"\n")


@asynccontextmanager
async def post(url: str, path: str, body: Mapping[str, Any]) -> AsyncIterator[Reply]:
    """Send one request on a connection of its own, which is cut at the end of the block."""
    server = urllib.parse.urlsplit(url)
    content = json.dumps(body).encode()
    fields = f"Host: {server.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    reader, writer = await asyncio.open_connection(server.hostname, server.port or 80, limit=MAX_LINE_BYTES)
    try:
        writer.write(f"POST {path} HTTP/1.0\r\n{fields}\r\n\r\n".encode() + content)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        yield Reply(int(head.split(b" ", 2)[1]), reader)
    finally:
        writer.transport.abort()


@dataclass(slots=True)
class Answer:
    """What a client has of one /v1/completions request of `num_choices` sequences, whole or cut."""

    num_choices: int = 1
    status: int = 0
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    notices: list[list[str]] = field(default_factory=list)  # of each sequence: preempted, resumed, preempted, ...
    timings: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_done: bool = False  # it says itself that it is whole

    def __post_init__(self) -> None:
        self.texts = [""] * self.num_choices
        self.finish_reasons = [None] * self.num_choices
        self.notices = [[] for _ in range(self.num_choices)]

    def read_line(self, line: bytes) -> None:
        """Take in one line of a stream."""
        if line == b"data: [DONE]":
            self.is_done = True
        elif line.startswith(b"data: "):
            self._read_event(json.loads(line[6:]))
        elif line.startswith((b": preempted", b": resumed")):
            name, _, index = line[2:].decode().partition(" ")
            self.notices[int(index or 0)].append(name)

    def read_whole(self, body: bytes) -> None:
        """Take in an answer that was not streamed."""
        self._read_event(json.loads(body))
        self.is_done = not self.error

    def _read_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
        for choice in event.get("choices", ()):
            self.texts[choice["index"]] += choice.get("text") or ""
            self.finish_reasons[choice["index"]] = choice["finish_reason"] or self.finish_reasons[choice["index"]]
        self.timings = event.get("timings") or self.timings


async def complete(url: str, body: Mapping[str, Any], answer: Answer) -> None:
    """Ask for a completion; `answer` is filled as it comes, so that a caller who hangs up has what came before."""
    async with post(url, "/v1/completions", body) as reply:
        answer.status = reply.status
        if body.get("stream") and reply.status == 200:
            async for line in reply.lines():
                answer.read_line(line)
        else:
            answer.read_whole(await reply.reader.read())


def figures(url: str) -> dict[str, float]:
    """The counters and gauges of /metrics by their names without the prefix."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text: str = reply.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#") and "{" not in name:
            found[name.split(":")[-1]] = float(value)
    return found
