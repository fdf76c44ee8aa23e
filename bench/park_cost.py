"""What a park costs, step by step: `python -m bench.park_cost [--model FILE] [--tokens 1280]`.

The engine with the demo model in this process, four chats, each parked every 64 tokens, a quarter of that apart. Steps
far from any park are what the others are compared with, so that a machine whose speed drifts does not matter, as it
does where two servers take turns (`bench.survivors`).

Printed: for the steps before and after the one in which somebody is parked, the time on the clock and what share of
them the loop had to start (others are started behind the step before), and the rows that are missing. Then what that
makes of the two figures that matter to those who are not parked, beside their targets: the 99th percentile of the time
between two tokens, as a share of that between parks, at most 1.1, and the tokens per second of all, at least 0.97.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.survivors import GAP_TARGET, NUM_CHATS, PARK_EVERY, RATE_TARGET
from pyserve.app import model_path
from pyserve.engine import Engine
from pyserve.handle import EngineHandle
from pyserve.models.load import load
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import SamplingParams, SequenceRequest
from tools.timeline import quantile

NEAR = range(-2, 8)  # steps from the one in which somebody is parked
PROMPT_LEN = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One that has ended."""

    seconds: float  # since the one before
    num_rows: int
    is_alone: bool  # started by the loop, not behind another
    num_parks: int  # that were posted before it ended, since the start


def watch(engine: Engine) -> list[Step]:
    """The steps of `engine` as they end."""
    steps: list[Step] = []
    finish_step = engine._finish_step
    ended_s = perf_counter()

    async def noted(begun: Any) -> None:
        nonlocal ended_s
        await finish_step(begun)
        now_s = perf_counter()
        steps.append(Step(now_s - ended_s, len(begun.step.rows), begun.step.sources is None, engine.counters.preempts))
        ended_s = now_s

    engine._finish_step = noted  # type: ignore[method-assign]
    return steps


async def chats(handle: EngineHandle, num_tokens: int) -> None:
    """Chat 2 begins when chat 1 has a quarter of PARK_EVERY tokens, and so on."""

    async def chat(number: int, has_begun: asyncio.Event) -> None:
        prompt = tuple(1000 + (number * PROMPT_LEN + place) * 7 for place in range(PROMPT_LEN))
        generation = handle.submit([SequenceRequest(prompt, SamplingParams(0.0), max_tokens=num_tokens)], "bench")
        num_taken = 0
        while not generation.is_over:
            num_taken += len(await generation.next_events())
            if num_taken >= PARK_EVERY // NUM_CHATS:
                has_begun.set()

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CHATS):
            has_begun = asyncio.Event()
            group.create_task(chat(number, has_begun))
            await has_begun.wait()


async def measure(path: Path, num_tokens: int) -> list[Step]:
    settings = Settings(
        ctx_size=4 * NUM_CHATS * (PROMPT_LEN + num_tokens), parallel=NUM_CHATS, preempt_every=PARK_EVERY
    )
    model = load(path, max_tokens=512, max_samples=512, max_positions=settings.ctx_size, num_threads=2)
    engine = build_engine(model, settings, num_threads=2)
    steps = watch(engine)
    handle = EngineHandle(engine)
    await handle.start()
    await chats(handle, num_tokens)
    await handle.stop()
    return steps


def report(steps: Sequence[Step]) -> str:
    counts = [each.num_parks for each in steps]
    parked = [place for place, (before, after) in enumerate(pairwise(counts), 1) if after > before]
    first = next(place for place, step in enumerate(steps) if step.num_rows == NUM_CHATS)
    last = max(place for place, step in enumerate(steps) if step.num_rows == NUM_CHATS)
    parked = [place for place in parked if first - NEAR[0] <= place <= last - NEAR[-1]]
    near = {place + offset for place in parked for offset in NEAR}
    far = [steps[place].seconds for place in range(first, last) if place not in near]
    lines = [
        f"{len(parked)} parks; a step far from any: median {statistics.median(far) * 1e3:.2f} ms",
        "| step | mean, ms | median, ms | started by the loop | rows missing |",
        "| --- | --- | --- | --- | --- |",
    ]
    extra_s = num_missing = 0.0
    for offset in NEAR:
        at = [steps[place + offset] for place in parked]
        seconds = [each.seconds for each in at]
        missing = statistics.mean(NUM_CHATS - each.num_rows for each in at)
        extra_s += statistics.median(seconds) - statistics.median(far)
        num_missing += missing
        lines.append(f"| {offset:+d} | {statistics.mean(seconds) * 1e3:.2f} | {statistics.median(seconds) * 1e3:.2f} | "
                     f"{100 * statistics.mean(each.is_alone for each in at):.0f} % | {missing:.2f} |")  # fmt: skip
    cycle = PARK_EVERY / NUM_CHATS + num_missing / NUM_CHATS  # steps from one park to the next
    rate = (1 - num_missing / (NUM_CHATS * cycle)) / (1 + extra_s / (cycle * statistics.median(far)))
    gap = quantile([each.seconds for each in steps[first:last]], 0.99) / quantile(far, 0.99)
    return "\n".join([
        *lines,
        f"a park takes {extra_s * 1e3:.2f} ms of everybody and {num_missing:.2f} tokens of the one that is parked",
        f"gap p99, share of that far from parks: {gap:.3f} (target at most {GAP_TARGET})",
        f"tokens per second, share of those far from parks: {rate:.3f} (target at least {RATE_TARGET})",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=1280, help="of each chat")
    chosen = parser.parse_args()
    path = chosen.model or model_path(Settings())
    print(report(asyncio.run(measure(path, chosen.tokens))))


if __name__ == "__main__":
    main()
