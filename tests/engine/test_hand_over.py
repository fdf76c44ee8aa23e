"""Tokens that a step hands over together reach their clients as they would one by one: all of them, in the same order.

The oracle is the same engine where no step's tokens are handed over together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pyserve import company
from pyserve.company import Companies
from pyserve.handle import EngineHandle
from pyserve.models.load import Model
from pyserve.serving import build_engine
from pyserve.settings import Settings
from pyserve.types import Event, Finished, PromptProgress, SamplingParams, SequenceRequest, Token
from tests.engine.workload import GREEDY, SEEDED, settle

Group = list[SequenceRequest]
Given = list[object]  # the events of one group, as its client saw them, without times
Patience = Mapping[int, int]  # place in the group -> tokens after which the client calls it off


@pytest.fixture
def num_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step handed over together."""
    counts: list[int] = []
    put_tokens = company.put_tokens

    def counted(generations: list[object], tokens: object) -> None:
        counts.append(len(generations))
        put_tokens(generations, tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(company, "put_tokens", counted)
    return counts


def serve(model: Model, groups: list[Group], patience: list[Patience]) -> list[Given]:
    return asyncio.run(_serve(model, groups, patience))


async def _serve(model: Model, groups: list[Group], patience: list[Patience]) -> list[Given]:
    engine = build_engine(model, Settings(ctx_size=2048, parallel=12, page_size=4), num_threads=1)
    handle = EngineHandle(engine)
    await handle.start()
    try:
        async with asyncio.timeout(60):
            given = await asyncio.gather(*map(_take, [handle] * len(groups), groups, patience))
        await settle(handle)
        assert handle.snapshot.free_pages + handle.snapshot.cached_pages == handle.snapshot.num_pages
        return given
    finally:
        await handle.stop()


async def _take(handle: EngineHandle, group: Group, patience: Patience) -> Given:
    generation, given = handle.submit(group, "request"), Given()
    num_tokens = [0] * len(group)
    while not generation.is_over:
        called_off = [place for place, limit in patience.items() if num_tokens[place] == limit]
        for event in await generation.next_events():
            assert event.index not in called_off, "an event for one that was called off before"
            if num_tokens[event.index] == patience.get(event.index):
                continue  # it was taken with the token at which the client had enough
            given.append(without_times(event))
            num_tokens[event.index] += isinstance(event, Token)
            if num_tokens[event.index] == patience.get(event.index):
                generation.cancel(event.index)
    return given


def without_times(event: Event) -> object:
    if isinstance(event, PromptProgress):
        return replace(event, time_ms=0.0)
    if isinstance(event, Finished):
        return event.index, event.reason, event.truncated, event.stats.generated_tokens
    return event


def random_group(dice: random.Random, *, may_want_logprobs: bool) -> Group:
    """Up to three continuations of one prompt."""
    prompt = tuple(dice.randrange(3, 96) for _ in range(dice.randrange(1, 30)))
    sampling: SamplingParams = dice.choice([GREEDY, SEEDED])
    if may_want_logprobs and dice.random() < 0.3:
        sampling = replace(sampling, num_logprobs=2)
    stops = frozenset(dice.sample(range(3, 96), dice.choice([0, 0, 2])))
    return [
        SequenceRequest(prompt, replace(sampling, seed=dice.randrange(99)), dice.randrange(1, 50), stops)
        for _ in range(dice.choice([1, 1, 2, 3]))
    ]


def workload(seed: int) -> list[Group]:
    dice = random.Random(seed)
    may_want_logprobs = bool(seed % 2)
    return [random_group(dice, may_want_logprobs=may_want_logprobs) for _ in range(4)]


def row_by_row(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Companies, "of", lambda *_: None)


def test_every_event_comes_in_the_order_in_which_it_comes_row_by_row(
    tiny_model: Model, num_together: list[int]
) -> None:
    workloads = list(map(workload, range(12)))
    together = [serve(tiny_model, groups, [{}] * len(groups)) for groups in workloads]
    assert sum(num_together) > 500 and max(num_together) > 5
    num_together.clear()
    with pytest.MonkeyPatch.context() as patched:
        row_by_row(patched)
        alone = [serve(tiny_model, groups, [{}] * len(groups)) for groups in workloads]
    assert together == alone and not num_together


def test_one_that_is_called_off_gets_no_more_and_the_others_all(tiny_model: Model, num_together: list[int]) -> None:
    """As when a stop string is found: some of a request's sequences, or all, at any token."""
    for seed in range(12):
        groups, dice = workload(seed), random.Random(seed)
        patience = [
            {place: dice.randrange(1, 40) for place in range(len(each)) if dice.random() < 0.5} for each in groups
        ]
        cut = serve(tiny_model, groups, patience)
        with pytest.MonkeyPatch.context() as patched:
            row_by_row(patched)
            whole = serve(tiny_model, groups, [{}] * len(groups))
        for got, wanted, limits, group in zip(cut, whole, patience, groups, strict=True):
            for place in range(len(group)):
                check(got, wanted, place, limits.get(place))
    assert sum(num_together) > 500


def check(got: Given, wanted: Given, place: int, limit: int | None) -> None:
    """`limit`: the tokens after which the client called this one off."""
    tokens, endings = tokens_of(got, place), endings_of(got, place)
    assert tokens == tokens_of(wanted, place)[:limit]
    assert endings == ([] if len(tokens) == limit else endings_of(wanted, place))


def tokens_of(given: Given, place: int) -> list[object]:
    return [event for event in given if isinstance(event, Token) and event.index == place]


def endings_of(given: Given, place: int) -> list[object]:
    return [event for event in given if isinstance(event, tuple) and event[0] == place]
