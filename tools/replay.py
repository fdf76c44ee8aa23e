"""A trace of requests against a live server: `python -m tools.replay --url http://127.0.0.1:8080 --trace FILE`.

    python -m tools.replay --requests 100 --speed 2 --scale 0.1      # drawn in the shape of Azure's conversations
    python -m tools.replay --trace azure-2023-conv.csv --requests 500 --scale 0.1
    python -m tools.replay --trace mooncake-conversation-2000.jsonl --scale 0.02 --json FILE

Requests arrive as in the trace, `--speed` times as fast, with prompts of random tokens (prefixes that a trace shares
are not kept). `--scale` multiplies the lengths of prompts and answers; one that would still be longer than the server's
context is shortened to it. Prints the time to the first token and the times between tokens, of the answers that were
never parked (survivors) apart from the parked ones. Exits with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.simulation import Request, conversations, read_trace, take
from tools.timeline import SHARES, Timeline, follow, spread


@dataclass(frozen=True, slots=True)
class Server:
    """What /props says about it."""

    url: str
    context_len: int
    first_token: int = 1000  # tokens below may be special ones
    last_token: int = 30000

    @staticmethod
    def at(url: str) -> Server:
        with urllib.request.urlopen(f"{url}/props", timeout=30) as reply:
            props = json.load(reply)
        return Server(url, int(props["default_generation_settings"]["n_ctx"]))


def scaled(request: Request, scale: float, context_len: int) -> Request:
    """The request with lengths times `scale`, at least 1, and shortened until both fit the context."""
    answer_len = min(max(1, round(request.answer_len * scale)), context_len // 2)
    prompt_len = min(max(1, round(request.prompt_len * scale)), context_len - answer_len)
    return Request(request.arrival_ms, prompt_len, answer_len)


async def replay(requests: Sequence[Request], server: Server, speed: float) -> list[Timeline]:
    """Send every request at its time; the timelines in the same order."""
    dice = random.Random(1)
    loop = asyncio.get_running_loop()
    started_s, first_ms = loop.time(), requests[0].arrival_ms
    timelines = [Timeline() for _ in requests]
    async with asyncio.TaskGroup() as group:
        for request, timeline in zip(requests, timelines, strict=True):
            due_s = started_s + (request.arrival_ms - first_ms) / 1e3 / speed
            await asyncio.sleep(due_s - loop.time())
            group.create_task(_one(server, request, timeline, dice.randrange(1 << 30)))
    return timelines


async def _one(server: Server, request: Request, timeline: Timeline, seed: int) -> None:
    dice = random.Random(seed)
    prompt = [dice.randrange(server.first_token, server.last_token) for _ in range(request.prompt_len)]
    body = {"prompt": prompt, "max_tokens": request.answer_len, "temperature": 0, "ignore_eos": True}
    try:
        await follow(server.url, body, timeline)
    except (OSError, EOFError) as error:
        timeline.error = repr(error)


def summary(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Milliseconds, for each of the two kinds of answers and for all."""
    good = [each for each in timelines if not each.error and each.tokens]
    kinds = {
        "survivors": [each for each in good if not each.parks],
        "parked": [each for each in good if each.parks],
        "all": good,
    }
    found: dict[str, Any] = {
        "requests": len(timelines),
        "failed": len(timelines) - len(good),
        "parks": sum(len(each.parks) for each in good),
        "tokens_per_s": _rate(good),
    }
    for name, group in kinds.items():
        found[name] = {
            "answers": len(group),
            "first_token_ms": spread([each.first_s * 1e3 for each in group]),
            "gap_ms": spread([gap * 1e3 for each in group for gap in each.gaps_s]),
        }
    return found


def _rate(timelines: Sequence[Timeline]) -> float:
    if not timelines:
        return 0.0
    last_s, first_s = max(each.tokens[-1] for each in timelines), min(each.started_s for each in timelines)
    return sum(len(each.tokens) for each in timelines) / (last_s - first_s)


def table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['requests']} requests, {found['failed']} failed, {found['parks']} parks, "
        f"{found['tokens_per_s']:.1f} pieces of text a second",
        f"| milliseconds | answers | {' | '.join(SHARES)} |",
        f"| --- | --- |{' --- |' * len(SHARES)}",
    ]
    for title, key in (("to the first token", "first_token_ms"), ("between tokens", "gap_ms")):
        for kind in ("survivors", "parked", "all"):
            values = " | ".join("-" if value is None else f"{value:.1f}" for value in found[kind][key].values())
            lines.append(f"| {title}, {kind} | {found[kind]['answers']} | {values} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--trace", type=Path, default=None, help="Azure's CSV or Mooncake's JSON lines")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast requests arrive")
    parser.add_argument("--scale", type=float, default=0.1, help="lengths are multiplied by it")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    chosen = parser.parse_args()
    if chosen.requests < 1 or chosen.speed <= 0 or chosen.scale <= 0:
        parser.error("--requests, --speed and --scale must be positive")
    server = Server.at(chosen.url)
    source = conversations() if chosen.trace is None else read_trace(chosen.trace)
    requests = [scaled(each, chosen.scale, server.context_len) for each in take(source, chosen.requests)]
    timelines = asyncio.run(replay(requests, server, chosen.speed))
    found = summary(timelines)
    print(table(found))
    for number, timeline in enumerate(timelines):
        if timeline.error:
            print(f"request {number}: {timeline.error}", file=sys.stderr)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(found["failed"]))


if __name__ == "__main__":
    main()
