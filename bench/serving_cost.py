"""What serving costs beside the model: `python -m bench.serving_cost [--chats 64] [--seconds 20]`.

The real server, engine and HTTP path with a model that answers at once (a tiny random one), all in this process: CPU
time of the loop's thread per token and stream, and how long the loop was ever blocked. The client is another process.
Printed beside the targets: 8 us of CPU per token and stream at 64 streams, no block above 5 ms at p99.9.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.config import Config

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


async def measure(chats: int, tokens: int) -> None:
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
    stop.set()
    await server


def report(num_tokens: int, chats: int, cpu_s: float, wall_s: float, lags_s: list[float]) -> None:
    print(f"{chats} chats, {num_tokens} tokens in {wall_s:.1f} s ({num_tokens / wall_s:.0f} tokens/s)")
    print(f"loop thread: {cpu_s / num_tokens * 1e6:.1f} us of CPU per token and stream (target 8, everything included)")
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
