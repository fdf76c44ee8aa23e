"""A streaming client that costs almost nothing: one connection, token ids in, arrival times out.

A measured server shares its processors with the client here, so the client parses nothing that it does not need: it
notes when bytes arrive and reads the usage from the last chunks.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stream:
    """What came back. Times in seconds of time.perf_counter(); `arrivals` one per token chunk."""

    started_s: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    notices: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.started_s

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the first token to the last."""
        return (self.num_tokens - 1) / (self.arrivals[-1] - self.arrivals[0])


async def complete(port: int, prompt: list[int], max_tokens: int, **fields: object) -> Stream:
    """Stream one /v1/completions request of token ids; `ignore_eos` is on, so that every server makes all tokens."""
    wanted = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
              "stream_options": {"include_usage": True}, **fields}  # fmt: skip
    body = json.dumps(wanted).encode()
    fields_text = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{fields_text}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    stream = Stream(time.perf_counter())
    writer.write(head.encode() + body)
    await writer.drain()
    while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
        _read(line, stream)
    writer.close()
    return stream


def _read(line: bytes, stream: Stream) -> None:
    if line.startswith(b":"):
        stream.notices.append(line[1:].strip().decode())
    elif line.startswith(b"data: {"):
        if b'"completion_tokens":' in line:
            usage = json.loads(line[6:]).get("usage")
            stream.num_tokens = usage["completion_tokens"] if usage else stream.num_tokens
        if b'"error"' in line:
            stream.error = line[6:].decode().strip()
        elif b'"choices":[]' not in line:
            stream.arrivals.append(time.perf_counter())
