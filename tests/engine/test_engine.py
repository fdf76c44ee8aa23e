"""Every workload under every pool size gives the bytes that each request gives alone (R36, R37), and leaves nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from pyserve.engine import Engine
from pyserve.errors import ContextExceeded, InvalidRequest, PoolExhausted, StepFailed, Unavailable
from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.runner import Step, StepResult
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import FinishReason, SamplingParams, SequenceRequest, Token
from tests.engine.workload import GREEDY, SEEDED, alone, assert_clean, four_chats, request, run, settle


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
def test_four_chats_on_a_full_pool_all_finish_as_alone(
    tiny_model: Model, sampling: SamplingParams, page_size: int, preempt_async: bool
) -> None:
    chats = four_chats(sampling)
    result = run(
        tiny_model,
        [[c] for c in chats],
        ctx_size=256,
        parallel=4,
        page_size=page_size,
        preempt_async=preempt_async,
        batch_size=32,
    )
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert result.preempts >= 1 and result.preempts == result.resumes
    assert_clean(result)


@pytest.mark.parametrize("preempt_async", [True, False], ids=["async", "sync"])
def test_forced_parks_change_nothing(tiny_model: Model, preempt_async: bool) -> None:
    chats = [request(seed, 20, 60, sampling=SEEDED) for seed in range(3)]
    result = run(
        tiny_model, [[c] for c in chats], ctx_size=512, parallel=4, preempt_every=8, preempt_async=preempt_async
    )
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert result.preempts >= 3 * 7
    for outcome in result.outcomes:
        assert outcome.notices == ["Preempted", "Resumed"] * (len(outcome.notices) // 2)
    assert_clean(result)


def test_with_the_planner_off_the_last_resort_saves_every_chat(tiny_model: Model) -> None:
    chats = four_chats(GREEDY)
    result = run(tiny_model, [[c] for c in chats], ctx_size=256, parallel=4, preempt_planner=False)
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert result.preempts >= 1
    assert_clean(result)


def test_a_park_budget_too_small_for_one_page_means_computing_again(tiny_model: Model) -> None:
    chats = four_chats(SEEDED)

    def no_room(engine: Engine) -> None:
        engine._parking.free_pages = lambda: 0  # type: ignore[method-assign]

    result = run(tiny_model, [[c] for c in chats], ctx_size=256, parallel=4, prepare=no_room)
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
    assert result.preempts >= 1
    assert_clean(result)


def test_an_answer_that_its_client_calls_complete_is_counted_as_finished(tiny_model: Model) -> None:
    """A stop string ends it so; it was counted as called off, and missing in the times of requests."""

    async def scenario() -> None:
        handle = EngineHandle(build_engine(tiny_model, Settings(ctx_size=192, parallel=4), num_threads=1))
        await handle.start()
        complete, called_off = (handle.submit([request(seed, 20, 100)], str(seed)) for seed in range(2))
        async with asyncio.timeout(60):
            for generation in (complete, called_off):
                while not any(isinstance(event, Token) for event in await generation.next_events()):
                    pass
            complete.complete(0)
            called_off.cancel(0)
            await settle(handle)
        counters = handle.counters
        await handle.stop()
        assert (counters.finished, counters.cancelled, counters.failed) == (1, 1, 0)
        assert complete.is_over and sum(counters.histograms["e2e_s"].counts) == 1

    asyncio.run(scenario())


def test_with_parking_off_one_chat_ends_and_the_rest_finish_as_alone(
    tiny_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    chats = [request(seed, 40, 90) for seed in range(3)]
    result = run(tiny_model, [[c] for c in chats], ctx_size=320, parallel=3, preempt_ram_mib=0)
    failed = [o for o in result.outcomes if o.error is not None]
    assert len(failed) == 1 and isinstance(failed[0].error, PoolExhausted)
    (said,) = [record for record in caplog.records if "--ctx-size" in record.getMessage()]
    assert said.levelname == "WARNING" and "parking is off" in said.getMessage()
    for outcome, chat in zip(result.outcomes, chats, strict=True):
        if outcome.error is None:
            assert outcome.tokens == alone(tiny_model, chat)
    assert_clean(result)


def test_two_prompts_that_each_nearly_fill_the_pool_both_finish(tiny_model: Model) -> None:
    chats = [request(seed, 252, 100) for seed in range(2)]
    result = run(tiny_model, [[c] for c in chats], ctx_size=256, parallel=2)
    for outcome in result.outcomes:
        assert outcome.finished is not None and outcome.finished.reason is FinishReason.LENGTH
        assert outcome.finished.truncated
        assert len(outcome.tokens) == 5  # four more cells, and one token that needs none
    assert_clean(result)


def test_several_continuations_of_one_prompt_share_it_and_differ_by_seed(tiny_model: Model) -> None:
    prompt = request(1, 50, 40).prompt
    group = [SequenceRequest(prompt, SamplingParams(temperature=1.0, seed=seed), max_tokens=40) for seed in (1, 2, 3)]
    result = run(tiny_model, [group], ctx_size=160, parallel=3, page_size=4)
    assert [o.tokens for o in result.outcomes] == [alone(tiny_model, one) for one in group]
    assert len({tuple(o.tokens) for o in result.outcomes}) == 3
    cached = [o.finished.stats.cached_tokens for o in result.outcomes if o.finished is not None]
    assert cached == [0, 48, 48]
    assert_clean(result)


def test_prompt_logprobs_do_not_depend_on_chunks(tiny_model: Model) -> None:
    prompt = request(3, 80, 1).prompt  # all that a conversation may have: no room for an answer is needed
    scored = SequenceRequest(prompt, GREEDY, max_tokens=0, prompt_logprobs=2)

    def entries(batch_size: int) -> object:
        async def collect() -> object:
            handle = EngineHandle(build_engine(tiny_model, Settings(ctx_size=80, batch_size=batch_size), num_threads=1))
            await handle.start()
            try:
                events = [event async for event in handle.submit([scored], "r")]
            finally:
                await handle.stop()
            return [event.entries for event in events if hasattr(event, "entries")]

        return asyncio.run(collect())

    small, large = entries(16), entries(64)
    assert small == large
    (only,) = large  # type: ignore[misc]
    assert [entry.token for entry in only] == list(prompt[1:])


@pytest.mark.parametrize("moment", ["start", "collect"])
def test_a_failed_step_ends_its_own_sequences_and_the_server_goes_on(tiny_model: Model, moment: str) -> None:
    async def scenario() -> None:
        engine = build_engine(tiny_model, Settings(ctx_size=256, parallel=2), num_threads=1)
        handle = EngineHandle(engine)
        real = getattr(engine._runner, moment)
        failures = iter([RuntimeError("the device is on fire")])

        def failing(step: object) -> object:
            result = real(step) if moment == "collect" else None
            error = next(failures, None)
            if error is not None:
                raise error
            return result if moment == "collect" else real(step)

        setattr(engine._runner, moment, failing)
        await handle.start()
        first = [event async for event in handle.submit([request(1, 20, 5)], "a")]
        assert isinstance(first[-1].error, StepFailed) and "on fire" in str(first[-1].error)  # type: ignore[union-attr]
        second = [event async for event in handle.submit([request(1, 20, 5)], "b")]
        assert sum(isinstance(event, Token) for event in second) == 5
        await handle.stop()

    asyncio.run(scenario())


def test_a_failed_step_does_not_end_those_who_are_parked(tiny_model: Model, caplog: pytest.LogCaptureFixture) -> None:
    chats = four_chats(SEEDED)
    in_step: set[int] = set()

    def prepare(engine: Engine) -> None:
        real = engine._runner.collect

        def failing(step: Step) -> StepResult:
            result = real(step)
            if not in_step and engine._ledger.parked():
                in_step.update(step.ids)
                raise RuntimeError("the device is on fire")
            return result

        engine._runner.collect = failing  # type: ignore[method-assign]

    result = run(tiny_model, [[c] for c in chats], ctx_size=256, parallel=4, page_size=4, prepare=prepare)
    assert 0 < len(in_step) < 4
    for number, (outcome, chat) in enumerate(zip(result.outcomes, chats, strict=True)):
        if number in in_step:
            assert isinstance(outcome.error, StepFailed) and "on fire" in str(outcome.error)
        else:
            assert outcome.tokens == alone(tiny_model, chat)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        f"{len(in_step)} sequences end: the step failed: the device is on fire"
    ]
    assert_clean(result)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(tiny_model: Model) -> None:
    async def scenario() -> None:
        handle = EngineHandle(build_engine(tiny_model, Settings(ctx_size=192, parallel=4, page_size=4), num_threads=1))
        await handle.start()
        source = random.Random(7)

        async def client(number: int) -> None:
            generation = handle.submit([request(number, source.randrange(5, 60), 100)], str(number))
            take = source.randrange(0, 60)
            async for event in generation:
                take -= 1
                if take < 0:
                    break
                del event
            generation.cancel()
            generation.cancel()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(client(number))
        await settle(handle)
        snapshot = handle.snapshot
        await handle.stop()
        assert snapshot.free_pages + snapshot.cached_pages == snapshot.num_pages
        assert snapshot.preempt_ram_bytes == 0 and snapshot.requests_preempted == 0
        assert all(slot.state == "idle" for slot in snapshot.slots)

    asyncio.run(scenario())


def test_requests_that_cannot_be_served_are_refused_before_anything_starts(tiny_model: Model) -> None:
    async def scenario() -> None:
        handle = EngineHandle(build_engine(tiny_model, Settings(ctx_size=64, parallel=1, max_queue=1), num_threads=1))
        await handle.start()
        with pytest.raises(ContextExceeded) as refused:
            handle.submit([request(1, 10, 5), request(2, 64, 5)], "too-long")
        assert refused.value.n_prompt_tokens == 64 and refused.value.n_ctx == 64
        with pytest.raises(ContextExceeded, match="65 tokens, which is more than the 64"):
            handle.submit([request(1, 65, 0)], "too-long-to-be-scored")
        with pytest.raises(InvalidRequest):  # not 503: trying again would never help
            handle.submit([request(n, 10, 5) for n in range(3)], "more-than-ever-fit")
        waiting = [handle.submit([request(n, 10, 40)], str(n)) for n in range(2)]
        with pytest.raises(Unavailable) as full:
            handle.submit([request(9, 10, 5)], "one-too-many")
        assert full.value.retry_after_s is not None
        for generation in waiting:
            generation.cancel()
        assert await handle.drain(5.0)
        with pytest.raises(Unavailable):
            handle.submit([request(9, 10, 5)], "draining")
        await handle.stop()

    asyncio.run(scenario())


def test_random_workloads_in_random_pools_match_solo_runs(tiny_model: Model) -> None:
    source = random.Random(11)
    for _ in range(8):
        chats = [
            request(
                source.randrange(1000),
                source.randrange(3, 80),
                source.randrange(1, 60),
                sampling=source.choice([GREEDY, SEEDED]),
            )
            for _ in range(source.randrange(2, 9))
        ]
        result = run(
            tiny_model,
            [[chat] for chat in chats],
            ctx_size=source.randrange(140, 400),
            parallel=source.randrange(1, 6),
            page_size=source.choice([1, 4, 16, 32]),
            batch_size=source.choice([8, 32, 512]),
            preempt_every=source.choice([0, 0, 5]),
            preempt_async=source.choice([True, False]),
        )
        assert [o.tokens for o in result.outcomes] == [alone(tiny_model, chat) for chat in chats]
        assert_clean(result)
