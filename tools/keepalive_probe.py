"""How long is a stream ever silent: `python -m tools.keepalive_probe --url http://127.0.0.1:8080 --limit 3`.

Opens one streamed completion, with `--company` others so that the pool fills and it is parked, and notes the time
between any bytes of it. Exits with 1 when the stream failed or was silent for longer than `--limit` seconds while it
was parked, and with 2 when it was never parked, which proves nothing: start the server with a smaller pool, or ask
for more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.streams import post
from tools.timeline import SHARES, Timeline, follow, quantile


@dataclass(slots=True)
class Probe:
    """One stream, byte by byte. Times in seconds."""

    timeline: Timeline = field(default_factory=Timeline)
    silences_s: list[float] = field(default_factory=list)
    parked_silences_s: list[float] = field(default_factory=list)  # those that began while it was parked

    async def watch(self, url: str, body: Mapping[str, Any]) -> None:
        last_s = self.timeline.started_s = time.perf_counter()
        rest = b""
        async with post(url, "/v1/completions", {**body, "stream": True}) as reply:
            if reply.status != 200:
                self.timeline.error = (await reply.reader.read()).decode()
                return
            async for piece in reply.pieces():
                now_s = time.perf_counter()
                self.silences_s.append(now_s - last_s)
                if self.timeline.num_parked:
                    self.parked_silences_s.append(now_s - last_s)
                last_s = now_s
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self.timeline.read_line(line, now_s)
        if not self.timeline.is_done:
            self.timeline.error = self.timeline.error or "the stream ended without [DONE]"


def body(number: int, prompt_len: int, max_tokens: int) -> dict[str, Any]:
    dice = random.Random(number)
    prompt = [dice.randrange(1000, 30000) for _ in range(prompt_len)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def run(url: str, company: int, prompt_len: int, max_tokens: int) -> Probe:
    """The probe and its company. The company has longer prompts, so that the probe is the one to be parked."""
    probe = Probe()
    others = [Timeline() for _ in range(company)]
    async with asyncio.TaskGroup() as group:
        for number, other in enumerate(others):
            group.create_task(follow(url, body(number + 1, prompt_len * 2, max_tokens), other))
        group.create_task(probe.watch(url, body(0, prompt_len, max_tokens)))
    for number, other in enumerate(others):
        if other.error:
            print(f"stream {number + 1} of the company: {other.error}", file=sys.stderr)
    return probe


def verdict(probe: Probe, limit_s: float) -> int:
    """Print what was seen; the exit status."""
    timeline = probe.timeline
    if timeline.error:
        print(f"the stream failed: {timeline.error}")
        return 1
    shares = ", ".join(f"{name} {quantile(probe.silences_s, share) * 1e3:.0f}" for name, share in SHARES.items())
    print(f"{len(timeline.tokens)} pieces of text; ms between any bytes: {shares}")
    if not timeline.parks:
        print("the stream was never parked")
        return 2
    longest_s = max(probe.parked_silences_s)
    print(f"parked {len(timeline.parks)} times; longest silence while parked {longest_s:.2f} s, limit {limit_s:.2f} s")
    return int(longest_s > limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds that a parked stream may be silent")
    parser.add_argument("--company", type=int, default=3, help="streams that fill the pool beside it")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=400)
    chosen = parser.parse_args()
    probe = asyncio.run(run(chosen.url, chosen.company, chosen.prompt_tokens, chosen.max_tokens))
    raise SystemExit(verdict(probe, chosen.limit))


if __name__ == "__main__":
    main()
