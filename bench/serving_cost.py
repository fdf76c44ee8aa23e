"""What serving costs beside the model: `python -m bench.serving_cost [--chats 64] [--tokens 400]`.

The real server, engine and HTTP path with a model that answers at once (a tiny random one), all in this process: CPU
time of the loop's thread per token and stream, and how long the loop was ever blocked. The client is another process.
Beside it, in the same run, what any server of this kind pays: a plain Starlette stream through the same hypercorn, that
sends frames of the same length with no engine behind it; and a bare `send` of such a frame on a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

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


FRAME = b"data: " + b"x" * 180 + b"\n\n"


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


async def measure_plain(chats: int, tokens: int) -> float:
    """Seconds of the loop thread's CPU per token and stream."""
    port, stop = free_port(), asyncio.Event()
    config = Config()
    config.bind, config.errorlog = [f"127.0.0.1:{port}"], None
    server = asyncio.create_task(serve(plain_app(chats, tokens), config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    await asyncio.sleep(0.3)
    cpu_s = time.thread_time()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, str(port), str(chats), str(tokens), stdout=subprocess.DEVNULL
    )
    await client.wait()
    cpu_s = time.thread_time() - cpu_s
    stop.set()
    await server
    return cpu_s / (chats * tokens)


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


async def measure(chats: int, tokens: int) -> None:
    plain_s, send_s = await measure_plain(chats, tokens), bare_send_s(chats)
    port = free_port()
    model = make_gguf(Path(tempfile.mkdtemp()) / "tiny.gguf")
    settings = Settings(model=str(model), parallel=chats, ctx_size=chats * (tokens + 32), port=port, threads=1)
    app, stop = create_app(settings), asyncio.Event()
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    server = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    while app.state is None or app.state.model is None:
        await asyncio.sleep(0.05)
    lags_s: list[float] = []
    watching = asyncio.create_task(probe(lags_s))
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, str(port), str(chats), str(tokens), stdout=subprocess.PIPE
    )
    output, _ = await client.communicate()
    cpu_s = time.thread_time() - cpu_s
    watching.cancel()
    report(int(output), chats, cpu_s, time.perf_counter() - started_s, sorted(lags_s))
    token_s = cpu_s / int(output)
    print(f"a plain Starlette stream: {plain_s * 1e6:.1f} us (ours {token_s / plain_s:.2f} of it, target 0.44)")
    print(f"a bare send on a socket: {send_s * 1e6:.1f} us")
    stop.set()
    await server


def report(num_tokens: int, chats: int, cpu_s: float, wall_s: float, lags_s: list[float]) -> None:
    print(f"{chats} chats, {num_tokens} tokens in {wall_s:.1f} s ({num_tokens / wall_s:.0f} tokens/s)")
    print(f"loop thread: {cpu_s / num_tokens * 1e6:.1f} us of CPU per token and stream (engine, text and HTTP)")
    at = {share: lags_s[int(len(lags_s) * share)] * 1e3 for share in (0.5, 0.99, 0.999)}
    print(
        f"loop blocked: p50 {at[0.5]:.2f} ms, p99 {at[0.99]:.2f} ms, p99.9 {at[0.999]:.2f} ms (target 5), "
        f"max {lags_s[-1] * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each chat")
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.chats, chosen.tokens))


if __name__ == "__main__":
    main()
