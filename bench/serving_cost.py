"""What serving costs beside the model: `python -m bench.serving_cost [--chats 64] [--tokens 400] [--rounds 3]`.

The real server, engine and HTTP path with a model that answers at once (a tiny random one), all in this process: CPU
time of the loop's thread per token and stream, and how long the loop was ever blocked. The client is another process.
In turn with it, in the same run, what any server of this kind pays: a plain Starlette stream through the same
hypercorn, that sends frames of the same length with no engine behind it. And a bare `send` of such a frame on a socket.
Both servers' figures hold the start and end of the streams. `bench.send_layers` says where a frame's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from bench.versus import free_port
from pyserve.app import create_app
from pyserve.settings import Settings
from tools.make_tiny_model import make_gguf

FRAME = b"data: " + b"x" * 180 + b"\n\n"
TARGET_S = 8e-6

_CLIENT = """
import asyncio, sys
from bench.sse_client import complete
port, chats, tokens = map(int, sys.argv[1:])
async def main():
    streams = await asyncio.gather(*(complete(port, [5 + n] * 8, tokens) for n in range(chats)))
    print(sum(stream.num_tokens for stream in streams))
asyncio.run(main())
"""


async def probe(lags_s: list[float], interval_s: float = 0.001) -> None:
    """Note by how much each short sleep of the loop was too long."""
    while True:
        due = time.perf_counter() + interval_s
        await asyncio.sleep(interval_s)
        lags_s.append(time.perf_counter() - due)


def plain_app(chats: int, tokens: int) -> Starlette:
    """Streams like ours, all woken together for each token once `chats` of them are open."""
    waiting: list[asyncio.Future[None]] = []

    async def frames() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            turn = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            if len(waiting) == chats:
                for each in waiting:
                    each.set_result(None)
                waiting.clear()
            await turn
            yield FRAME
        yield b"data: [DONE]\n\n"

    async def stream(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(frames(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", stream, methods=["POST"])])


@asynccontextmanager
async def served(app: Any, port: int) -> AsyncIterator[None]:
    """hypercorn with `app`."""
    stop, config = asyncio.Event(), Config()
    config.bind, config.errorlog = [f"127.0.0.1:{port}"], None
    server = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))
    yield
    stop.set()
    await server


async def ask(port: int, chats: int, tokens: int) -> tuple[float, float]:
    """All streams once. (the loop thread's CPU, the time on the clock), both in seconds per token and stream."""
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, str(port), str(chats), str(tokens), stdout=subprocess.DEVNULL
    )
    if await client.wait():
        raise RuntimeError("the client failed")
    count = chats * tokens
    return (time.thread_time() - cpu_s) / count, (time.perf_counter() - started_s) / count


def bare_send_s(chats: int, rounds: int = 200) -> float:
    """Seconds of CPU of one `send` of a frame, in turn on as many local connections, with nobody reading meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = []
        for _ in range(chats):
            pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))
        started_s = time.thread_time()
        for _ in range(rounds):
            for sender, _ in pairs:
                sender.send(FRAME)
        spent_s = time.thread_time() - started_s
        for pair in pairs:
            for end in pair:
                end.close()
    return spent_s / (chats * rounds)


async def measure(chats: int, tokens: int, rounds: int) -> None:
    model = make_gguf(Path(tempfile.mkdtemp()) / "tiny.gguf")
    port, plain_port = free_port(), free_port()
    settings = Settings(model=str(model), parallel=chats, ctx_size=chats * (tokens + 32), port=port, threads=1)
    app = create_app(settings)
    ours_s, walls_s, plain_s, lags_s = [], [], [], list[float]()
    async with served(plain_app(chats, tokens), plain_port), served(app, port):
        while app.state is None or app.state.model is None:
            await asyncio.sleep(0.05)
        for _ in range(rounds):
            plain_s.append((await ask(plain_port, chats, tokens))[0])
            cpu_s, wall_s = await ask(port, chats, tokens)
            ours_s.append(cpu_s)
            walls_s.append(wall_s)
        watching = asyncio.create_task(probe(lags_s))  # in a round of its own: it costs the loop something too
        await ask(port, chats, tokens)
        watching.cancel()
    token_s, stream_s = statistics.median(ours_s), statistics.median(plain_s)
    print(f"{chats} chats of {tokens} tokens, {rounds} times; {1 / statistics.median(walls_s):.0f} tokens/s")
    print(f"loop thread: {_spread(ours_s)} us of CPU per token and stream (engine, text and HTTP)")
    print(f"a plain Starlette stream: {_spread(plain_s)} us (ours {token_s / stream_s:.2f} of it, "
          f"target {TARGET_S / stream_s:.2f})")  # fmt: skip
    print(f"a bare send on a socket: {bare_send_s(chats) * 1e6:.1f} us")
    lags_s.sort()
    at = {share: lags_s[int(len(lags_s) * share)] * 1e3 for share in (0.5, 0.99, 0.999)}
    print(
        f"loop blocked: p50 {at[0.5]:.2f} ms, p99 {at[0.99]:.2f} ms, p99.9 {at[0.999]:.2f} ms (target 5), "
        f"max {lags_s[-1] * 1e3:.1f} ms"
    )


def _spread(times_s: list[float]) -> str:
    """Median and range in microseconds."""
    return f"{statistics.median(times_s) * 1e6:.1f} ({min(times_s) * 1e6:.1f} to {max(times_s) * 1e6:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each chat")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.chats, chosen.tokens, chosen.rounds))


if __name__ == "__main__":
    main()
