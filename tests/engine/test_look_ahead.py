"""A step that is started behind another, before its tokens are known, changes nothing that a client sees (R36).

The oracle is the same engine with one step at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pyserve.engine import Engine
from pyserve.handle import EngineHandle
from pyserve.models.load import Model, load
from pyserve.runner import Runner, Step
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import Finished, SamplingParams, SequenceRequest, Token
from tests.engine.workload import GREEDY, SEEDED, Outcome, assert_clean, request, run, settle
from tools.make_tiny_model import make_gguf

NUM_WORKLOADS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = make_gguf(tmp_path_factory.mktemp("ahead") / "tiny.gguf", type="Q4_1", seed=9)
    return load(path, max_tokens=600, max_samples=600, max_positions=512, num_threads=2)


@contextmanager
def one_step_at_a_time(model: Model) -> Iterator[None]:
    model.program.can_follow = False
    try:
        yield
    finally:
        del model.program.can_follow


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch, num_repeated: list[int]) -> list[int]:
    """The number of rows of every step that was started behind another."""
    counts: list[int] = []
    prepare_next = Runner.prepare_next

    def counted(self: Runner, rows: object, sources: list[int]) -> object:
        counts.append(len(sources))
        return prepare_next(self, rows, sources)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "prepare_next", counted)
    repeat = Runner.repeat

    def counted_again(self: Runner, step: Step) -> Step:
        counts.append(len(step.rows))
        num_repeated.append(len(step.rows))
        return repeat(self, step)

    monkeypatch.setattr(Runner, "repeat", counted_again)
    return counts


@pytest.fixture
def num_repeated() -> list[int]:
    """Of those that were made from the step before them."""
    return []


def random_request(source: random.Random) -> SequenceRequest:
    prompt = tuple(source.randrange(3, 96) for _ in range(source.randrange(1, 80)))
    sampling: SamplingParams = replace(source.choice([GREEDY, SEEDED]), seed=source.randrange(1 << 40))
    stops = frozenset(source.sample(range(3, 96), source.choice([0, 2, 8])))
    if stops and source.random() < 0.5:
        sampling = replace(sampling, banned_until=tuple((token, 12) for token in stops))
    if source.random() < 0.3:
        sampling = replace(
            sampling,
            repeat_penalty=source.choice([1.0, 1.4]),
            repeat_last_n=source.choice([-1, 0, 1, 5, 64]),
            presence_penalty=source.choice([0.0, 0.7]),
            frequency_penalty=source.choice([0.0, 0.3]),
            logit_bias=tuple(
                (token, source.uniform(-2, 4)) for token in source.sample(range(96), source.choice([0, 9]))
            ),
        )
    return SequenceRequest(prompt, sampling, max_tokens=source.randrange(0, 60), stop_tokens=stops)


def on_the_host(wanted: SequenceRequest) -> SequenceRequest:
    """The same where its logits change: whoever wants log-probabilities is not sampled by the program."""
    sampling = wanted.sampling
    is_weighed = sampling.logit_bias or sampling.frequency_penalty or sampling.repeat_penalty != 1.0
    return replace(wanted, sampling=replace(sampling, num_logprobs=0)) if is_weighed else wanted


def seen(outcome: Outcome) -> object:
    assert outcome.error is None and outcome.finished is not None
    return outcome.tokens, outcome.finished.reason


def test_steps_between_forced_parks_are_made_from_those_before_them(
    model: Model, num_ahead: list[int], num_repeated: list[int]
) -> None:
    """As on a server that forces none."""
    wanted = [SequenceRequest(tuple(range(3 + number, 40)), GREEDY, max_tokens=129) for number in range(2)]
    result = run(model, [[each] for each in wanted], ctx_size=1024, parallel=2, preempt_every=32)
    assert result.preempts == 6 and len(num_ahead) > len(num_repeated) > 64
    assert_clean(result)


def test_tokens_and_endings_are_those_of_one_step_at_a_time(
    model: Model, num_ahead: list[int], num_repeated: list[int]
) -> None:
    source = random.Random(3)
    num_parks = 0
    for _ in range(NUM_WORKLOADS):
        requests = [random_request(source) for _ in range(source.randrange(1, 8))]
        together = run(
            model,
            [[each] for each in requests],
            ctx_size=source.randrange(160, 900),
            parallel=source.randrange(1, 7),
            page_size=source.choice([1, 4, 16]),
            batch_size=source.choice([16, 512]),
            preempt_every=source.choice([0, 0, 9]),
            preempt_async=source.choice([True, True, False]),
            preempt_planner=source.choice([True, True, False]),
        )
        assert_clean(together)
        num_parks += together.preempts
        with one_step_at_a_time(model):
            alone = [run(model, [[on_the_host(each)]], ctx_size=512, parallel=1).outcomes[0] for each in requests]
        assert [seen(outcome) for outcome in together.outcomes] == [seen(outcome) for outcome in alone]
    assert num_parks > 50
    assert len(num_ahead) > 500 and max(num_ahead) > 3
    assert len(num_repeated) > 500 and max(num_repeated) > 3


def test_a_full_pool_is_met_as_early_as_without(model: Model, num_ahead: list[int]) -> None:
    """Looking ahead takes pages a step earlier; it must not be what makes the pool too small."""
    requests = [request(seed, 40, 80) for seed in range(4)]
    result = run(model, [[each] for each in requests], ctx_size=256, parallel=4, page_size=4)
    assert num_ahead and result.preempts == result.resumes > 0
    with one_step_at_a_time(model):
        before = run(model, [[each] for each in requests], ctx_size=256, parallel=4, page_size=4)
    assert [each.tokens for each in result.outcomes] == [each.tokens for each in before.outcomes]
    assert abs(result.preempts - before.preempts) <= 1


@pytest.mark.parametrize("max_tokens", [40, 1000], ids=["as asked", "context"])
def test_whoever_reaches_the_end_has_no_row_too_many(
    model: Model, num_ahead: list[int], num_repeated: list[int], max_tokens: int
) -> None:
    """Of all lengths, and of one length; it is known beforehand, so that no step computes anything for nobody."""
    requests = [request(seed, 20, min(max_tokens, length)) for seed, length in enumerate((25, 40, 40, 1000))]
    result = run(model, [[each] for each in requests], ctx_size=512, parallel=4, page_size=4)
    num_tokens = sum(len(outcome.tokens) for outcome in result.outcomes)
    assert result.counters.busy_slots == num_tokens, "a row for each prompt gives the first, and one each of the others"
    assert num_ahead and num_repeated and not result.preempts


def test_clients_that_leave_at_any_token_free_everything(model: Model, num_ahead: list[int]) -> None:
    source = random.Random(4)

    async def leave(handle: EngineHandle, wanted: SequenceRequest, patience: int) -> list[int]:
        generation, tokens = handle.submit([wanted], "request"), list[int]()
        async for event in generation:
            if isinstance(event, Token):
                tokens.append(event.token)
            if isinstance(event, Finished) or len(tokens) == patience:
                break
        generation.cancel()
        return tokens

    async def serve(requests: list[SequenceRequest], patiences: list[int]) -> list[list[int]]:
        engine: Engine = build_engine(model, Settings(ctx_size=600, parallel=4, page_size=4), num_threads=1)
        handle = EngineHandle(engine)
        await handle.start()
        try:
            async with asyncio.timeout(60):
                given = await asyncio.gather(*map(leave, [handle] * len(requests), requests, patiences))
                await settle(handle)
            snapshot = handle.snapshot
            assert snapshot.free_pages + snapshot.cached_pages == snapshot.num_pages
            assert all(slot.state == "idle" for slot in snapshot.slots)
            return given
        finally:
            await handle.stop()

    requests = [replace(random_request(source), max_tokens=50) for _ in range(60)]
    patiences = [source.randrange(1, 30) for _ in requests]
    given = asyncio.run(serve(requests, patiences))
    assert num_ahead
    with one_step_at_a_time(model):
        for wanted, patience, tokens in zip(requests, patiences, given, strict=True):
            whole = run(model, [[wanted]], ctx_size=512, parallel=1).outcomes[0].tokens
            assert tokens[:patience] == whole[:patience]


def test_a_failed_step_ends_those_in_the_step_behind_it_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    collect, num_steps = Runner.collect, iter(range(1000))

    def failing(self: Runner, step: object) -> object:
        result = collect(self, step)  # type: ignore[arg-type]
        if next(num_steps) == 20:
            raise RuntimeError("the machine is on fire")
        return result

    monkeypatch.setattr(Runner, "collect", failing)
    result = run(model, [[request(seed, 10, 60)] for seed in range(3)], ctx_size=400, parallel=2)
    errors = [str(outcome.error) for outcome in result.outcomes if outcome.error]
    assert errors and all("on fire" in error for error in errors)
    assert result.counters.failed == len(errors) < 3
    assert_clean(result)
