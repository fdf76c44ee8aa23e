"""How long the event loop is ever held up under a mixed load: `python -m bench.loop_block [--seconds 60] [--chats 16]`.

The real server with the demo model in this process, and clients in another: each opens one chat after the other, with
prompts of 16 to 600 tokens and answers of 1 to 200, and every eighth hangs up in the middle. A probe
in the loop sleeps for 1 ms again and again; printed is how much too long that took, beside the target of 5 ms at p99.9.
The same probe in a process that does nothing else, with as many threads computing beside it, says what of it is the
machine's. What is the loop's own is in the second line: the processor time of each callback and of each turn of the
loop (all callbacks that were ready at once), which no other thread's work is part of.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from hypercorn.asyncio import serve
from hypercorn.config import Config

from bench.serving_cost import probe
from bench.versus import free_port
from pyserve.app import create_app
from pyserve.settings import Settings

_CLIENT = """
import asyncio, random, sys, time
from bench.sse_client import complete
port, chats, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
ends_s = time.monotonic() + seconds
async def client(number):
    dice, count = random.Random(number), 0
    while time.monotonic() < ends_s:
        prompt = [dice.randrange(1000, 30000) for _ in range(dice.randrange(16, 600))]
        wanted = complete(port, prompt, dice.randrange(1, 200))
        if dice.random() < 1 / 8:
            try:
                await asyncio.wait_for(wanted, dice.random())
            except TimeoutError:
                pass
        else:
            await wanted
        count += 1
    return count
async def main():
    print(sum(await asyncio.gather(*(client(n) for n in range(chats)))))
asyncio.run(main())
"""


class LoopTimes:
    """Processor time in seconds of every callback, and of every turn of the running loop."""

    def __init__(self) -> None:
        self.callbacks_s: list[float] = []
        self.turns_s: list[float] = []
        self._run_callback, self._run_turn = asyncio.Handle._run, asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def __enter__(self) -> Self:
        asyncio.Handle._run = _timed(self._run_callback, self.callbacks_s)  # type: ignore[method-assign]
        asyncio.BaseEventLoop._run_once = _timed(self._run_turn, self.turns_s)  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run_callback  # type: ignore[method-assign]
        asyncio.BaseEventLoop._run_once = self._run_turn  # type: ignore[attr-defined]


def _timed(function: Callable[[Any], None], times_s: list[float]) -> Callable[[Any], None]:
    def timed(self: Any) -> None:
        started_s = time.thread_time()
        function(self)
        times_s.append(time.thread_time() - started_s)

    return timed


def quantiles(lags_s: list[float]) -> str:
    lags_s = sorted(lags_s)
    p50, p99, p999 = (lags_s[int(len(lags_s) * share)] * 1e3 for share in (0.5, 0.99, 0.999))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, p99.9 {p999:.2f} ms, max {lags_s[-1] * 1e3:.1f} ms"


async def measure(chats: int, seconds: float, threads: int, times: LoopTimes) -> tuple[int, list[float]]:
    """The requests answered or hung up, and the probe's delays in seconds. `times` is filled."""
    port, stop = free_port(), asyncio.Event()
    settings = Settings(parallel=chats, ctx_size=chats * 512, port=port, threads=threads)
    app, config = create_app(settings), Config()
    config.bind, config.errorlog = [f"127.0.0.1:{port}"], None
    server = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    while app.state is None or app.state.model is None:
        await asyncio.sleep(0.05)
    lags_s: list[float] = []
    times.callbacks_s.clear()
    times.turns_s.clear()
    watching = asyncio.create_task(probe(lags_s))
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, str(port), str(chats), str(seconds), stdout=subprocess.PIPE
    )
    output, _ = await client.communicate()
    watching.cancel()
    times.callbacks_s, times.turns_s = times.callbacks_s.copy(), times.turns_s.copy()
    stop.set()
    await server
    return int(output), lags_s


def spin(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        pass


def machine_lags(threads: int, seconds: float) -> list[float]:
    """The probe's delays beside `threads` processes that only compute."""
    workers = [multiprocessing.Process(target=spin, args=(seconds,)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    lags_s: list[float] = []

    async def watch() -> None:
        watching = asyncio.create_task(probe(lags_s))
        await asyncio.sleep(seconds * 0.9)
        watching.cancel()

    asyncio.run(watch())
    for worker in workers:
        worker.join()
    return lags_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    with LoopTimes() as times:
        count, lags_s = asyncio.run(measure(chosen.chats, chosen.seconds, chosen.threads, times))
    print(f"{count} requests of {chosen.chats} clients in {chosen.seconds:.0f} s")
    print(f"the loop, too late by: {quantiles(lags_s)} (target 5 ms at p99.9)")
    print(f"a callback's own time: {quantiles(times.callbacks_s)}; a turn's: {quantiles(times.turns_s)}")
    print(f"beside {chosen.threads} spinning processes: {quantiles(machine_lags(chosen.threads, 10))}")


if __name__ == "__main__":
    main()
