"""pyserve beside other servers on one model file: `python -m bench.versus --server NAME=COMMAND ... [--model FILE]`.

Each COMMAND is a llama-server binary with any flags of its own; model, context, slots, threads and port are added
here. Servers run one at a time, in turn, several rounds, so that a machine whose speed drifts is as fast for one as
for the other; the ratio is taken round by round. Printed: the median of every figure, the ratios, and what the machine
can do (memory read rate), measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.limits import memory_read_gb_s
from bench.sse_client import Stream, complete
from pyserve.app import model_path
from pyserve.settings import Settings

Measure = Callable[[int], Awaitable[float]]

MEASURE_LIMIT_S = 120.0  # a server that has not answered by then is started anew
MAX_STARTS = 3


@dataclass(frozen=True)
class Case:
    """One row of the table. `measure` gets the port and gives tokens per second."""

    name: str
    parallel: int
    ctx_size: int  # tokens of the whole server
    measure: Measure


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000, 40000) for _ in range(length)]


async def chats(port: int, count: int, num_tokens: int, prompt_len: int = 32) -> list[Stream]:
    runs = (complete(port, prompt(prompt_len, 100 + n), num_tokens) for n in range(count))
    streams = await asyncio.gather(*runs)
    for stream in streams:
        if stream.error or stream.num_tokens < num_tokens:
            raise RuntimeError(f"a stream ended after {stream.num_tokens} of {num_tokens} tokens {stream.error}")
    return streams


def decode(count: int, num_tokens: int, prompt_len: int = 32) -> Measure:
    async def measure(port: int) -> float:
        streams = await chats(port, count, num_tokens, prompt_len)
        started = max(stream.arrivals[0] for stream in streams)
        ended = min(stream.arrivals[-1] for stream in streams)
        inside = sum(sum(started < at <= ended for at in stream.arrivals) for stream in streams)
        return inside / (ended - started)

    return measure


def prompt_rate(length: int) -> Measure:
    async def measure(port: int) -> float:
        stream = await complete(port, prompt(length, time.perf_counter_ns()), 1, cache_prompt=False)
        return length / stream.first_s

    return measure


CASES = (
    Case("one chat, decode", 1, 2048, decode(1, 256)),
    Case("four chats, decode", 4, 4096, decode(4, 192)),
    Case("sixteen chats, decode", 16, 8192, decode(16, 128)),
    Case("prompt of 512", 1, 2048, prompt_rate(512)),
    Case("prompt of 2048", 1, 4096, prompt_rate(2048)),
    Case("decode at 4096 of context", 1, 8192, decode(1, 96, prompt_len=4096)),
)


def command(server: str, model: Path, case: Case, threads: int, port: int) -> list[str]:
    shared = ["-m", str(model), "-c", str(case.ctx_size), "-np", str(case.parallel), "-t", str(threads)]
    return [*shlex.split(server), *shared, "--host", "127.0.0.1", "--port", str(port)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not come up")


def run_case(server: str, model: Path, case: Case, threads: int, repeats: int) -> float:
    """Tokens per second of `case`; a server that stops answering (some do, now and then) gets a fresh start."""
    for start in range(1, MAX_STARTS + 1):
        try:
            return run_once(server, model, case, threads, repeats)
        except TimeoutError:
            print(f"{shlex.split(server)[0]}: no answer in {MEASURE_LIMIT_S:.0f} s at {case.name!r}, start {start}")
    raise RuntimeError(f"{server} did not answer in {MAX_STARTS} starts")


def run_once(server: str, model: Path, case: Case, threads: int, repeats: int) -> float:
    """The best of `repeats` measurements on one fresh server, after one that warms it up. Tokens per second."""
    port = free_port()
    process = subprocess.Popen(
        command(server, model, case, threads, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_healthy(port, process)
        asyncio.run(complete(port, prompt(16, 1), 8))
        return max(asyncio.run(limited(case.measure(port))) for _ in range(repeats))
    finally:
        stop(process)


async def limited(measurement: Awaitable[float]) -> float:
    return await asyncio.wait_for(measurement, MEASURE_LIMIT_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # some servers wait for their clients' connections
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=COMMAND", help="a server to compare with"
    )
    parser.add_argument("--model", type=Path, default=None, help="GGUF file (default: the demo model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="measurements on each started server; the best counts")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this text")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    chosen = parser.parse_args()
    servers = {"pyserve": f"{shlex.quote(sys.executable)} -m pyserve"}
    servers |= dict(entry.split("=", 1) for entry in chosen.server)
    model = chosen.model or model_path(Settings())
    cases = [case for case in CASES if not chosen.case or any(text in case.name for text in chosen.case)]
    figures: dict[str, dict[str, list[float]]] = {case.name: {name: [] for name in servers} for case in cases}
    limit = memory_read_gb_s(chosen.threads)
    for case in cases:
        for round_number in range(chosen.rounds):
            for name in rotate(list(servers), round_number):
                figures[case.name][name].append(run_case(servers[name], model, case, chosen.threads, chosen.repeats))
        print(row(case.name, figures[case.name]), flush=True)
    size = model.stat().st_size
    print(
        f"memory read rate, {chosen.threads} threads: {limit:.1f} GB/s; model file {size / 1e6:.0f} MB: "
        f"one row can decode at most {limit * 1e9 / size:.0f} tokens/s from memory"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"memory_read_gb_s": limit, "tokens_per_s": figures}, indent=1) + "\n")


def rotate(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def row(name: str, rates: dict[str, list[float]]) -> str:
    """One Markdown row: every server's median, and pyserve's ratio to each other, round by round."""
    cells = [f"{who} {statistics.median(values):.0f}" for who, values in rates.items()]
    ours = rates["pyserve"]
    for who, values in rates.items():
        if who != "pyserve":
            cells.append(f"x{statistics.median(a / b for a, b in zip(ours, values, strict=True)):.2f} {who}")
    return f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
