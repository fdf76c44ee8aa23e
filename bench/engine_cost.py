"""What the engine costs beside the model: `python -m bench.engine_cost [--rows 1 16 64 256] [--steps 1000]`.

The real engine, ledger, runner and queues, with a program that is done as soon as it is started. Printed: CPU time of
the loop's thread for each step, while nobody takes the tokens and with a task for each stream that takes them as a
server's do, but writes nothing; beside the target of 60 us + 0.5 us for each row. Of windows of 48 steps, in which
everybody enters as many pages, the one in the middle counts.

Then the longest turn of the loop, CPU time, for a prompt of `--prompts` tokens that is one chunk of one-token pages: in
a pool full of finished ones, of which as many are evicted, and once more, all but its end from the prompt cache. Of a
few such prompts the one in the middle and the worst.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.loop_block import LoopTimes
from pyserve.generation import Generation
from pyserve.handle import EngineHandle
from pyserve.models.load import Model, load
from pyserve.ops import StepBatch
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import SamplingParams, SequenceRequest
from tools.make_tiny_model import make_gguf

WARM_UP_STEPS = 50
WINDOW_STEPS = 48
POOL_TOKENS = 65_536  # where prompts are measured
NUM_PROMPTS = 11


class Instant:
    """A program whose steps are done at once; every row picks the same token."""

    vocab_size = 96
    can_follow = True

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._num_samples: list[int] = []
        self._picked = torch.full((1 << 16,), 5, dtype=torch.int32)
        self._num_started = 0
        self.window_ends_s: list[float] = []  # time.thread_time()

    def start(self, batch: StepBatch, *_: Any) -> None:
        self._num_started += 1
        if self._num_started > WARM_UP_STEPS and self._num_started % WINDOW_STEPS == 0:
            self.window_ends_s.append(time.thread_time())
        self._num_samples.append(batch.sample_rows.shape[0])
        os.write(self._writer, b"x")

    def fileno(self) -> int:
        return self._reader

    def num_done(self) -> int:
        return len(os.read(self._reader, 64))

    def collect(self) -> torch.Tensor:
        return self._picked[: self._num_samples.pop(0)]


def room_for(num_steps: int) -> int:
    """Tokens that each row generates."""
    return num_steps + 2 * WARM_UP_STEPS


async def measure(model: Model, num_rows: int, num_steps: int, *, is_taken: bool) -> float:
    """Seconds of CPU a step; `is_taken`: with a client for each stream."""
    room = room_for(num_steps)
    engine = build_engine(model, Settings(ctx_size=num_rows * (room + 32), parallel=num_rows), num_threads=1)
    program = Instant()
    engine._runner._program = program  # type: ignore[assignment]
    handle = EngineHandle(engine)
    await handle.start()

    taking = asyncio.Event()

    async def client(generation: Generation) -> None:
        if not is_taken:
            await taking.wait()
        while not generation.is_over:
            await generation.next_events()

    sampling = SamplingParams(temperature=0.0)
    requests = [SequenceRequest((3, 4, 5 + number % 90), sampling, max_tokens=room) for number in range(num_rows)]
    clients = [asyncio.create_task(client(handle.submit([each], "bench"))) for each in requests]
    while handle.counters.steps < WARM_UP_STEPS + num_steps and not engine.is_empty.is_set():
        await asyncio.sleep(0.01)
    ends_s = program.window_ends_s[: num_steps // WINDOW_STEPS]
    taking.set()
    await asyncio.gather(*clients)
    await handle.stop()
    return statistics.median(end_s - start_s for start_s, end_s in pairwise(ends_s)) / WINDOW_STEPS


async def measure_turns(model: Model, prompt_len: int) -> tuple[list[float], list[float]]:
    """Seconds of the longest turn for each of `NUM_PROMPTS` prompts: when it is new, and when it comes again."""
    settings = Settings(ctx_size=POOL_TOKENS, parallel=1, page_size=1, batch_size=prompt_len)
    engine = build_engine(model, settings, num_threads=1)
    engine._runner._program = Instant()  # type: ignore[assignment]
    handle, dice = EngineHandle(engine), random.Random(1)
    await handle.start()

    async def longest_turn_s(prompt: tuple[int, ...], times: LoopTimes) -> float:
        times.turns_s.clear()
        async for _ in handle.submit([SequenceRequest(prompt, SamplingParams(temperature=0.0), 2)], "bench"):
            pass
        return max(times.turns_s)

    new_s, again_s = [], []
    with LoopTimes() as times:
        for _ in range(POOL_TOKENS // prompt_len + NUM_PROMPTS):
            prompt = tuple(dice.choices(range(Instant.vocab_size), k=prompt_len))
            new_s.append(await longest_turn_s(prompt, times))
            again_s.append(await longest_turn_s(prompt, times))
    await handle.stop()
    return new_s[-NUM_PROMPTS:], again_s[-NUM_PROMPTS:]


def print_rows(model: Model, rows: list[int], num_steps: int) -> None:
    print("| rows | engine, us | target | with a task that takes each stream's tokens, us |\n| --- | --- | --- | --- |")
    for num_rows in rows:
        engine_s, served_s = (
            asyncio.run(measure(model, num_rows, num_steps, is_taken=taken)) for taken in (False, True)
        )
        print(f"| {num_rows} | {engine_s * 1e6:.0f} | {60 + 0.5 * num_rows:.0f} | {served_s * 1e6:.0f} |", flush=True)


def print_prompts(model: Model, prompt_lens: list[int]) -> None:
    print("\n| pages of a prompt | new: median, worst, ms | again: median, worst, ms |\n| --- | --- | --- |")
    for prompt_len in prompt_lens:
        gc.collect()  # the engine before, which would be taken apart in one of the turns that are measured
        times_ms = [[s * 1e3 for s in times_s] for times_s in asyncio.run(measure_turns(model, prompt_len))]
        columns = [f"{statistics.median(each):.1f}, {max(each):.1f}" for each in times_ms]
        print(f"| {prompt_len} | {columns[0]} | {columns[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, nargs="*", default=[2000, 8000])
    chosen = parser.parse_args()
    if chosen.steps < 4 * WINDOW_STEPS:
        parser.error(f"--steps must be at least {4 * WINDOW_STEPS}: there is nothing in the middle of fewer windows")
    longest = max(chosen.prompts, default=0)
    context_len = max(room_for(chosen.steps), longest) + 32
    path = make_gguf(Path(tempfile.mkdtemp()) / "tiny.gguf", context=context_len)
    max_tokens = max(1200, longest)
    model = load(path, max_tokens=max_tokens, max_samples=1200, max_positions=context_len, num_threads=1)
    gc.collect()
    gc.freeze()  # as the server does
    print_rows(model, chosen.rows, chosen.steps)
    print_prompts(model, chosen.prompts)


if __name__ == "__main__":
    main()
