"""Logits that are no numbers: their sequence ends with one clear error, the others of the step go on (R26, R39)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from pyserve.engine import Engine
from pyserve.errors import BrokenLogits
from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.runner import Step
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import Failed, SamplingParams, SequenceRequest, Token
from tests.engine.workload import GREEDY, SEEDED, alone, assert_clean, request, run


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


class Poison:
    """Writes NaN over the first page of one sequence when it has so many tokens, once: what a faulty kernel leaves."""

    def __init__(self, engine: Engine, sequence_id: int, num_tokens: int) -> None:
        self.is_done = False
        self._engine, self._id, self._num_tokens = engine, sequence_id, num_tokens
        self._start = engine._runner.start
        engine._runner.start = self.start  # type: ignore[method-assign]

    def start(self, step: Step) -> None:
        for each in step.rows.sequences:
            if each.id == self._id and not self.is_done and len(each.tokens) >= self._num_tokens:
                self._engine._parking._kv.tensor[each.pages[0]] = float("nan")
                self.is_done = True
        self._start(step)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [31, 60])  # at the step behind the prompt; in the steady state
def test_whose_logits_are_no_numbers_ends_and_the_others_go_on(
    tiny_model: Model, caplog: pytest.LogCaptureFixture, sampling: SamplingParams, num_tokens: int
) -> None:
    chats = [request(seed, 30, 60, sampling=sampling) for seed in range(4)]
    made: list[Poison] = []
    result = run(
        tiny_model, [[c] for c in chats], ctx_size=512, parallel=4, page_size=4,
        prepare=lambda engine: made.append(Poison(engine, 2, num_tokens)),
    )  # fmt: skip
    assert made[0].is_done
    for number, (outcome, chat) in enumerate(zip(result.outcomes, chats, strict=True)):
        if number == 2:
            assert isinstance(outcome.error, BrokenLogits) and outcome.error.status == 500
            assert outcome.finished is None
            assert outcome.tokens == alone(tiny_model, chat)[: len(outcome.tokens)]
            assert num_tokens - 31 <= len(outcome.tokens) < 60
        else:
            assert outcome.error is None and outcome.tokens == alone(tiny_model, chat)
    (line,) = errors(caplog)
    assert line.startswith("1 sequences end: ") and "weights" in line and "kernel" in line
    assert_clean(result)


def test_nobody_goes_on_from_the_pages_of_a_broken_sequence(tiny_model: Model) -> None:
    """The same request again is computed anew, and is right."""
    chat = request(7, 40, 30)
    wanted = alone(tiny_model, chat)

    async def ask(handle: EngineHandle) -> tuple[list[int], bool]:
        events = [event async for event in handle.submit([chat], "chat")]
        return [event.token for event in events if isinstance(event, Token)], isinstance(events[-1], Failed)

    async def scenario() -> None:
        engine = build_engine(tiny_model, Settings(ctx_size=256, parallel=2, page_size=4), num_threads=1)
        Poison(engine, 0, 50)
        handle = EngineHandle(engine)
        await handle.start()
        _, has_failed = await ask(handle)
        assert has_failed
        engine._ledger.check_integrity()
        assert await ask(handle) == (wanted, False)
        await handle.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_logprobs", [None, 1])
def test_who_bans_every_token_gets_an_error_that_says_so(tiny_model: Model, num_logprobs: int | None) -> None:
    other = request(1, 20, 30, sampling=SEEDED)
    bans = tuple((token, float("-inf")) for token in range(tiny_model.spec.vocab_size))
    chat = request(2, 10, 30, sampling=replace(SEEDED, logit_bias=bans, num_logprobs=num_logprobs))
    result = run(tiny_model, [[other], [chat]], ctx_size=256, parallel=2)
    assert result.outcomes[0].tokens == alone(tiny_model, other)
    assert isinstance(result.outcomes[1].error, BrokenLogits) and "logit_bias" in str(result.outcomes[1].error)
    assert result.outcomes[1].tokens == []
    assert_clean(result)


class NanProgram:
    """A program whose logits have a NaN in the row of one token of a step."""

    def __init__(self, program: Any, token: int) -> None:
        self._program, self._token = program, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, batch: Any, kv: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._program.run(batch, kv)
        logits[batch.tokens[batch.sample_rows.long()] == self._token, 5] = float("nan")
        return logits


def test_no_log_probability_is_made_of_them(tiny_model: Model) -> None:
    """Of a prompt that is scored, wherever in it they are, and of a token."""

    def prepare(engine: Engine) -> None:
        engine._runner._program = NanProgram(engine._runner._program, 95)

    asked = [
        SequenceRequest(prompt, sampling, max_tokens=4, prompt_logprobs=scored)
        for prompt in ((8, 95, 9, 10), (8, 9, 10, 95), (8, 9, 10, 11))
        for sampling, scored in ((GREEDY, 1), (replace(GREEDY, num_logprobs=1), None))
    ]
    result = run(tiny_model, [[each] for each in asked], ctx_size=256, parallel=4, prepare=prepare)
    for each, outcome in zip(asked, result.outcomes, strict=True):
        is_broken = each.prompt[-1] == 95 or (95 in each.prompt and each.prompt_logprobs is not None)
        assert isinstance(outcome.error, BrokenLogits) == is_broken, each
        assert len(outcome.tokens) == (0 if is_broken else 4)
    assert_clean(result)
