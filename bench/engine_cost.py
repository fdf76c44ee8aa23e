"""What the engine costs beside the model: `python -m bench.engine_cost [--rows 1 16 64 256] [--steps 1000]`.

The real engine, ledger, runner and queues, with a program that is done as soon as it is started. Printed: CPU time of
the loop's thread for each step, while nobody takes the tokens and with a task for each stream that takes them as a
server's do, but writes nothing; beside the target of 60 us + 0.5 us for each row. Of windows of 48 steps, in which
everybody enters as many pages, the one in the middle counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    chosen = parser.parse_args()
    if chosen.steps < 4 * WINDOW_STEPS:
        parser.error(f"--steps must be at least {4 * WINDOW_STEPS}: there is nothing in the middle of fewer windows")
    context_len = room_for(chosen.steps) + 32
    path = make_gguf(Path(tempfile.mkdtemp()) / "tiny.gguf", context=context_len)
    model = load(path, max_tokens=1200, max_samples=1200, max_positions=context_len, num_threads=1)
    gc.collect()
    gc.freeze()  # as the server does
    print("| rows | engine, us | target | with a task that takes each stream's tokens, us |\n| --- | --- | --- | --- |")
    for num_rows in chosen.rows:
        engine_s, served_s = (
            asyncio.run(measure(model, num_rows, chosen.steps, is_taken=taken)) for taken in (False, True)
        )
        print(f"| {num_rows} | {engine_s * 1e6:.0f} | {60 + 0.5 * num_rows:.0f} | {served_s * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
