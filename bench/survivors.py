"""What parks cost those that are not parked: `python -m bench.survivors [--rounds 7]`.

Four chats on the demo model, each begun a quarter of 64 tokens after the one before, so that their forced parks come
one at a time. Three servers take turns, round by round, on the same chats:

    plain      a pool that holds everything, no parks
    forced     the same pool, every chat parked each 64 tokens
    pressure   the same, on a pool of two thirds of what the chats need

Printed for each: the 99th percentile of the gap between two tokens of a chat in which it was not itself parked, between
the last chat's first token and the first chat's last; and the tokens of all chats per second over the whole round. Then
their ratios to the plain server of the same round, with the error of the median, beside the targets: a gap of at most
1.1, a rate of at least 0.97. Both come out wrong on a machine that does something else: pool rounds of several runs.
Last the rate of the copy stream, in parks of three sizes, beside memcpy.

Under pressure fewer chats run at a time, which makes gaps shorter and the rate lower, whatever the parks cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.versus import rotate
from pyserve import ops
from tests.e2e.server import Server, running
from tools.streams import figures
from tools.timeline import Timeline, follow, quantile

NUM_CHATS, PROMPT_LEN, ANSWER_LEN, PARK_EVERY = 4, 64, 320, 64
NEED = NUM_CHATS * (PROMPT_LEN + ANSWER_LEN)  # cells
FORCED = ("--preempt-every", str(PARK_EVERY))
SERVERS = {
    "plain": ("--ctx-size", str(4 * NEED)),
    "forced": ("--ctx-size", str(4 * NEED), *FORCED),
    "pressure": ("--ctx-size", str(NEED * 2 // 3), *FORCED),
}
GAP_TARGET, RATE_TARGET = 1.1, 0.97


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round. Gaps in milliseconds, of chats while they are not parked."""

    gap_p50: float
    gap_p99: float
    tokens_per_s: float
    num_parks: int


async def chats(url: str, seed: int) -> list[Timeline]:
    """Chat 2 begins when chat 1 has a quarter of PARK_EVERY tokens, and so on."""
    timelines = [Timeline() for _ in range(NUM_CHATS)]
    async with asyncio.TaskGroup() as group:
        for number, timeline in enumerate(timelines):
            dice = random.Random(seed * NUM_CHATS + number)
            prompt = [dice.randrange(1000, 30000) for _ in range(PROMPT_LEN)]
            body = {"prompt": prompt, "max_tokens": ANSWER_LEN, "temperature": 0, "ignore_eos": True}
            group.create_task(follow(url, body, timeline))
            while len(timeline.tokens) < PARK_EVERY // NUM_CHATS and not timeline.error:
                await asyncio.sleep(0.001)
    for timeline in timelines:
        if timeline.error:
            raise RuntimeError(timeline.error)
    return timelines


def measure(server: Server, seed: int) -> Round:
    before = figures(server.url)
    timelines = asyncio.run(chats(server.url, seed))
    server.wait_until_idle()
    after = figures(server.url)
    begin_s, end_s = max(each.tokens[0] for each in timelines), min(each.tokens[-1] for each in timelines)
    gaps_ms = [gap * 1e3 for each in timelines for gap in each.running_gaps_s(begin_s, end_s)]
    seconds = max(each.tokens[-1] for each in timelines) - min(each.started_s for each in timelines)
    num_tokens = after["tokens_predicted_total"] - before["tokens_predicted_total"]
    num_parks = int(after["n_preempt_total"] - before["n_preempt_total"])
    return Round(quantile(gaps_ms, 0.5), quantile(gaps_ms, 0.99), num_tokens / seconds, num_parks)


def memcpy_gb_s(num_bytes: int) -> float:
    """One plain copy of so many bytes, by one thread as the copy stream has one."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return num_bytes / _median_seconds(lambda: target.copy_(source)) / 1e9
    finally:
        torch.set_num_threads(threads)


def copy_gb_s(num_pages: int) -> tuple[int, float]:
    """Bytes, and the rate at which the copy stream parks every fourth page of a pool shaped like the demo model's."""
    pool = ops.allocate_pool(4 * num_pages, 30, 3, 16, 64, torch.float16).fill_(1.0)
    pages = torch.arange(0, 4 * num_pages, 4, dtype=torch.int32)
    host = torch.ones(num_pages * ops.page_bytes(pool), dtype=torch.uint8)
    stream = ops.CopyStream()
    try:
        return host.numel(), host.numel() / _median_seconds(
            lambda: stream.copy_pages(pool, host, pages, True).wait()
        ) / 1e9
    finally:
        stream.close()


def _median_seconds(action: Any, repeats: int = 15) -> float:
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def ratio(rounds: dict[str, list[Round]], name: str, figure: str) -> str:
    """Median over the rounds of a figure as a share of the plain server's in the same round, and how far that may be
    off: 1.25 standard errors of the mean, as for a median.
    """
    pairs = zip(rounds[name], rounds["plain"], strict=True)
    shares = [getattr(ours, figure) / getattr(plain, figure) for ours, plain in pairs]
    error = 1.25 * statistics.pstdev(shares) / max(1, len(shares) - 1) ** 0.5
    return f"{statistics.median(shares):.3f} ± {error:.3f}"


def report(rounds: dict[str, list[Round]]) -> str:
    lines = ["| server | gap p50, ms | gap p99, ms | tokens/s | parks a round | gap p99 ratio | rate ratio |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, measured in rounds.items():
        medians = [
            statistics.median(values) for values in zip(*(asdict(each).values() for each in measured), strict=True)
        ]
        gap, rate = (ratio(rounds, name, figure) for figure in ("gap_p99", "tokens_per_s"))
        lines.append(f"| {name} | {medians[0]:.2f} | {medians[1]:.2f} | {medians[2]:.1f} | {medians[3]:.0f} | "
                     f"{gap} | {rate} |")  # fmt: skip
    return "\n".join([*lines, f"targets: gap p99 ratio at most {GAP_TARGET}, rate ratio at least {RATE_TARGET}"])


def copy_report() -> tuple[str, dict[str, float]]:
    lines: list[str] = []
    found: dict[str, float] = {}
    for num_tokens in (PARK_EVERY, PROMPT_LEN + ANSWER_LEN, 8192):
        num_bytes, rate = copy_gb_s(num_tokens // 16)
        limit = memcpy_gb_s(num_bytes)
        found |= {f"copy_{num_tokens}_gb_s": rate, f"memcpy_{num_tokens}_gb_s": limit}
        lines.append(f"park of {num_tokens} tokens, {num_bytes / 1e6:.1f} MB: {rate:.1f} GB/s, "
                     f"{100 * rate / limit:.0f} % of memcpy's {limit:.1f} GB/s")  # fmt: skip
    return "\n".join(lines), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="after one that warms up")
    parser.add_argument(
        "--flag", action="append", default=[], help="a further flag for all servers: --flag=--page-size=1"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    chosen = parser.parse_args()
    rounds: dict[str, list[Round]] = {name: [] for name in SERVERS}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running("--parallel", str(NUM_CHATS), *flags, *chosen.flag))
            for name, flags in SERVERS.items()
        }
        for number in range(chosen.rounds + 1):
            for name in rotate(list(servers), number):
                measured = measure(servers[name], number)
                if number:
                    rounds[name].append(measured)
    copies, rates = copy_report()
    print(report(rounds) + "\n" + copies)
    if chosen.json is not None:
        figures_ = {name: [asdict(each) for each in measured] for name, measured in rounds.items()}
        chosen.json.write_text(json.dumps({"rounds": figures_, "copies": rates}, indent=1) + "\n")


if __name__ == "__main__":
    main()
