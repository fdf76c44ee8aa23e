"""Runs requests through a real engine with a tiny random model, and says what each client would have seen."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pyserve.engine import Engine
from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import (
    Counters,
    Failed,
    Finished,
    Preempted,
    Resumed,
    SamplingParams,
    SequenceRequest,
    Snapshot,
    Token,
    TokenLogprobs,
)

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass
class Outcome:
    """One sequence as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None


@dataclass
class Run:
    """A whole workload's outcomes, and the engine's state after the last one."""

    outcomes: list[Outcome]
    snapshot: Snapshot
    preempts: int
    resumes: int
    counters: Counters


def ignore_speed(engine: Engine) -> None:
    """Every tier is worth its copies, however busy the machine that runs the test is."""
    engine._transfers.rates.prompt.enough = float("inf")


def request(
    seed: int, prompt_len: int, max_tokens: int, *, vocab: int = 96, sampling: SamplingParams = GREEDY
) -> SequenceRequest:
    """A random prompt of `prompt_len` tokens, the same for the same seed."""
    source = random.Random(seed)
    prompt = tuple(source.randrange(3, vocab) for _ in range(prompt_len))
    return SequenceRequest(prompt, replace(sampling, seed=seed), max_tokens=max_tokens)


def run(
    model: Model,
    groups: Sequence[Sequence[SequenceRequest]],
    *,
    prepare: Callable[[Engine], None] = lambda engine: None,
    **settings: object,
) -> Run:
    """Submit every group at once; each outcome in order of groups and their sequences."""
    return asyncio.run(_run(model, groups, prepare, Settings(**settings)))  # type: ignore[arg-type]


async def _run(
    model: Model, groups: Sequence[Sequence[SequenceRequest]], prepare: Callable[[Engine], None], settings: Settings
) -> Run:
    engine = build_engine(model, settings, num_threads=1)
    prepare(engine)
    handle = EngineHandle(engine)
    await handle.start()
    try:
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(_consume(handle, group, number) for number, group in enumerate(groups)))
        await settle(handle)
        counters = handle.counters
        outcomes = [o for result in results for o in result]
        return Run(outcomes, handle.snapshot, counters.preempts, counters.resumes, counters)
    finally:
        await handle.stop()


async def settle(handle: EngineHandle) -> None:
    """Wait until the engine has noticed that nothing is left."""
    for _ in range(200):
        snapshot = handle.snapshot
        if (snapshot.held_pages, snapshot.transfer_pages, snapshot.preempt_ram_bytes) == (0, 0, 0):
            return
        await asyncio.sleep(0.005)


async def _consume(handle: EngineHandle, group: Sequence[SequenceRequest], number: int) -> list[Outcome]:
    outcomes = [Outcome() for _ in group]
    async for event in handle.submit(group, f"request-{number}"):
        outcome = outcomes[event.index]
        if isinstance(event, Token):
            outcome.tokens.append(event.token)
            outcome.logprobs.append(event.logprobs)
        elif isinstance(event, Preempted | Resumed):
            outcome.notices.append(type(event).__name__)
        elif isinstance(event, Finished):
            outcome.finished = event
        elif isinstance(event, Failed):
            outcome.error = event.error
    return outcomes


def alone(model: Model, wanted: SequenceRequest, **settings: object) -> list[int]:
    (outcome,) = run(model, [[wanted]], ctx_size=512, parallel=1, **settings).outcomes
    assert outcome.error is None
    return outcome.tokens


def assert_clean(result: Run) -> None:
    """No slot is busy, no page held, no host memory kept."""
    snapshot = result.snapshot
    assert all(slot.state == "idle" for slot in snapshot.slots)
    assert snapshot.free_pages + snapshot.cached_pages == snapshot.num_pages
    assert (snapshot.requests_preempted, snapshot.preempt_ram_bytes, snapshot.num_waiting) == (0, 0, 0)


def four_chats(sampling: SamplingParams) -> list[SequenceRequest]:
    return [request(seed, 30 + 5 * seed, 90, sampling=sampling) for seed in range(4)]
