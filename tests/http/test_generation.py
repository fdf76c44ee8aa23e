"""The queue between the engine and a stream: nothing is lost, nothing comes late, whoever waits or gives up."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine

from pyserve.generation import Generation, put_tokens
from pyserve.types import Failed, Finished, FinishReason, SequenceStats, Token


def in_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 10))

    return run


def new(count: int = 1) -> Generation:
    return Generation(count, lambda index, is_complete: None)


def tokens(*ids: int) -> list[Token]:
    return [Token(0, token) for token in ids]


@in_loop
async def test_what_came_while_nobody_waited_comes_at_once() -> None:
    generation = new()
    for token in tokens(1, 2):
        generation.put(token)
    assert await generation.next_events() == tokens(1, 2)


@in_loop
async def test_events_of_one_turn_wake_a_waiting_stream_together() -> None:
    generation = new()
    waiting = asyncio.create_task(generation.next_events())
    await asyncio.sleep(0)
    for token in tokens(1, 2):
        generation.put(token)
    assert await waiting == tokens(1, 2)


@in_loop
async def test_a_wait_that_was_given_up_loses_nothing() -> None:
    generation = new()
    waiting = asyncio.create_task(generation.next_events(asyncio.get_running_loop().time() + 60))
    await asyncio.sleep(0)
    waiting.cancel()
    generation.put(Token(0, 1))
    await asyncio.gather(waiting, return_exceptions=True)
    generation.put(Token(0, 2))
    assert await generation.next_events() == tokens(1, 2)
    again = asyncio.create_task(generation.next_events())
    await asyncio.sleep(0)
    generation.put(Token(0, 3))
    assert await asyncio.wait_for(again, 1) == tokens(3)


@in_loop
async def test_a_deadline_holds_although_an_earlier_wait_had_another() -> None:
    """Both ways: the timer of an earlier wait neither ends a later one too soon nor lets it sleep too long."""
    generation, loop = new(), asyncio.get_running_loop()
    for first_s, second_s in ((0.02, 0.06), (60, 0.02)):
        generation.put(Token(0, 1))
        await generation.next_events()
        waiting = asyncio.create_task(generation.next_events(loop.time() + first_s))
        await asyncio.sleep(0)
        generation.put(Token(0, 2))
        assert await waiting == tokens(2)
        due, events = time.monotonic() + second_s, await generation.next_events(loop.time() + second_s)
        assert events == [] and not generation.is_over
        assert time.monotonic() >= due - 0.001


@in_loop
async def test_a_cancelled_request_ends_the_wait() -> None:
    generation = new(2)
    generation.put(Token(0, 1))
    generation.put(Failed(1, RuntimeError("no"), SequenceStats()))
    assert len(await generation.next_events()) == 2
    waiting = asyncio.create_task(generation.next_events())
    await asyncio.sleep(0)
    generation.cancel()
    assert await asyncio.wait_for(waiting, 1) == [] and generation.is_over
    generation.put(Token(0, 2))
    assert generation.is_over


@in_loop
async def test_the_tokens_of_a_step_reach_whoever_still_wants_them_in_their_order() -> None:
    one, pair, gone = new(), new(2), new(2)
    waiting = [asyncio.create_task(each.next_events()) for each in (one, pair)]
    await asyncio.sleep(0)
    one.put(Token(0, 1))
    gone.put(Finished(0, FinishReason.STOP, SequenceStats()))
    gone.cancel(1)
    step = [Token(0, 2), Token(0, 3), Token(1, 4), Token(0, 5), Token(1, 6)]
    put_tokens([one, pair, pair, gone, gone], step)
    assert await waiting[0] == tokens(1, 2) and await waiting[1] == [Token(0, 3), Token(1, 4)]
    assert await gone.next_events() == [Finished(0, FinishReason.STOP, SequenceStats())] and gone.is_over


@in_loop
async def test_tokens_of_a_step_for_whoever_gave_up_waiting_are_there_later() -> None:
    generation = new()
    waiting = asyncio.create_task(generation.next_events())
    await asyncio.sleep(0)
    waiting.cancel()
    put_tokens([generation], tokens(1))
    await asyncio.gather(waiting, return_exceptions=True)
    assert await generation.next_events() == tokens(1)
