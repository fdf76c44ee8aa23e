"""What a stream says about parks: comments, in order, in pairs, on time, and never inside the data (R27-R32)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from pyserve.http.sse import Notices
from pyserve.settings import Settings
from pyserve.types import Finished, FinishReason, Preempted, Resumed, SequenceRequest, Started, Token
from tests.http.asking import COMPLETIONS, chat, complete, frames, loaded_app, raw_call, stream_text
from tests.http.fake_engine import FakeEngine, FakeServed, Step, stats, word

HELLO, THERE = word("Hello"), word(" there")


def parking(*, parked_s: float = 0.0, before_first_token: bool = False) -> FakeServed:
    """Each sequence is parked once, between its two tokens or before the first."""

    def script(index: int, request: SequenceRequest) -> list[Step]:
        first: list[Step] = [0.01, Token(index, HELLO)]
        park: list[Step] = [Preempted(index), parked_s, Resumed(index)]
        rest: list[Step] = [Token(index, THERE), Finished(index, FinishReason.STOP, stats(request, 2, n_preempt=1))]
        middle = [*park, *first] if before_first_token else [*first, *park]
        return [Started(index, index), *middle, *rest]

    return FakeServed(FakeEngine(script=script))


def comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.startswith(":")]


def stable(text: str) -> list[Any]:
    """The data of a stream without what differs from run to run."""
    chunks = frames(text)
    for chunk in chunks[:-1]:
        for member in ("id", "created", "timings"):
            chunk.pop(member, None)
    return chunks


def test_a_park_is_told_where_it_happened_in_one_line_each() -> None:
    text = chat({"stream": True}, served=parking()).text
    assert comments(text) == [": preempted", ": resumed"]
    assert (
        text.index('"Hello"') < text.index(": preempted\n") < text.index(": resumed\ndata: ") < text.index('" there"')
    )
    assert frames(text)[-2]["timings"]["n_preempt"] == 1


def test_the_data_is_that_of_a_run_without_parks() -> None:
    """R31."""

    def unparked(index: int, request: SequenceRequest) -> list[Step]:
        steps = (parking().engine.script or (lambda index, request: []))(index, request)
        return [step for step in steps if not isinstance(step, Preempted | Resumed)]

    plain = chat({"stream": True}, served=FakeServed(FakeEngine(script=unparked)))
    assert stable(plain.text) == stable(chat({"stream": True}, served=parking()).text)
    answer = chat(served=parking()).json()
    assert answer["choices"][0]["message"]["content"] == "Hello there" and answer["timings"]["preempted_ms"] == 5.0


@pytest.mark.parametrize(
    ("body", "settings"), [({"sse_comments": False}, Settings()), ({}, Settings(sse_comments=False))]
)
def test_comments_can_be_switched_off(body: dict[str, Any], settings: Settings) -> None:
    text = chat({"stream": True, **body}, served=parking(parked_s=0.2), settings=settings).text
    assert comments(text) == [] and stream_text(frames(text)) == "Hello there"


def test_a_park_before_the_first_token_opens_the_stream() -> None:
    """R29: headers and notice go out while the sequence still waits."""

    def script(index: int, request: SequenceRequest) -> list[Step]:
        end = Finished(index, FinishReason.STOP, stats(request, 1))
        return [Preempted(index), 0.4, Resumed(index), Token(index, HELLO), end]

    call = asyncio.run(raw_call(loaded_app(FakeServed(FakeEngine(script=script))), chat_body()))
    assert call.status == 200 and call.headers_s < 0.2
    assert call.sent[0][1] == b": preempted\n" and call.sent[0][0] < 0.2


def test_headers_go_out_when_the_slot_is_taken_not_at_the_first_token() -> None:
    def script(index: int, request: SequenceRequest) -> list[Step]:
        end = Finished(index, FinishReason.STOP, stats(request, 1))
        return [0.2, Started(index, 0), 0.3, Token(index, HELLO), end]

    call = asyncio.run(raw_call(loaded_app(FakeServed(FakeEngine(script=script))), chat_body()))
    assert 0.15 < call.headers_s < 0.4 and call.sent[0][0] > 0.45


def chat_body(**extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "stream": True, **extra}


def test_later_prompts_are_named_and_the_first_is_not() -> None:
    text = complete({"prompt": ["a", "b", "c"], "stream": True}, served=parking()).text
    named = sorted(comments(text))
    assert named == sorted(f": {what}{suffix}" for what in ("preempted", "resumed") for suffix in ("", " 1", " 2"))


def test_typed_events_for_programs() -> None:
    """R32."""
    chunks = frames(chat({"stream": True, "stream_options": {"include_preemption": True}}, served=parking()).text)
    told = [chunk for chunk in chunks[:-1] if "preemption" in chunk]
    assert [chunk["preemption"] for chunk in told] == [
        {"index": 0, "state": "preempted"},
        {"index": 0, "state": "resumed"},
    ]
    assert all(chunk["choices"] == [] and chunk["object"] == "chat.completion.chunk" for chunk in told)


def busy_beside_a_parked_one(parked_s: float) -> Callable[[int, SequenceRequest], list[Step]]:
    """Sequence 1 is parked for long while sequence 0 gives a token every 10 ms."""

    def script(index: int, request: SequenceRequest) -> list[Step]:
        end = Finished(index, FinishReason.LENGTH, stats(request, 1))
        if index == 1:
            return [Started(1, 1), Preempted(1), parked_s, Resumed(1), Token(1, HELLO), end]
        tokens: list[Step] = [step for _ in range(int(parked_s / 0.01)) for step in (Token(0, HELLO), 0.01)]
        return [Started(0, 0), *tokens, end]

    return script


def test_keepalives_come_on_time_however_busy_the_stream_is() -> None:
    """R28: deadlines are absolute, so the traffic of the other sequence does not postpone them."""
    app = loaded_app(FakeServed(FakeEngine(script=busy_beside_a_parked_one(1.1))))
    body = {"prompt": ["a", "b"], "stream": True, "sse_ping_interval": 0.2}
    call = asyncio.run(raw_call(app, body, path=COMPLETIONS))
    times = call.times_of(b": preempt-keepalive 1\n")
    assert len(times) == 5
    assert all(abs(at - 0.2 * (count + 1)) < 0.12 for count, at in enumerate(times)), times
    assert call.body.count(b": preempted 1\n") == call.body.count(b": resumed 1\n") == 1
    assert b"\n\n:" in call.body and b"keepalive 1\n\n" not in call.body


def test_keepalives_of_a_silent_stream_and_pings_of_an_idle_one() -> None:
    app = loaded_app(parking(parked_s=0.5))
    call = asyncio.run(raw_call(app, chat_body(sse_ping_interval=0.2)))
    assert len(call.times_of(b": preempt-keepalive\n")) == 2

    def slow(index: int, request: SequenceRequest) -> list[Step]:
        return [Started(index, 0), 0.5, Token(index, HELLO), Finished(index, FinishReason.STOP, stats(request, 1))]

    app = loaded_app(FakeServed(FakeEngine(script=slow)), Settings(sse_ping_interval_s=0.2))
    assert [data for _, data in asyncio.run(raw_call(app, chat_body())).sent[:2]] == [b":\n", b":\n"]
    call = asyncio.run(raw_call(app, chat_body(sse_ping_interval=-1)))
    assert b":\n" not in call.body.replace(b'":\n', b"")


def test_a_stream_that_waits_for_a_slot_is_pinged() -> None:
    def queued(index: int, request: SequenceRequest) -> list[Step]:
        return [0.5, Started(index, 0), Token(index, HELLO), Finished(index, FinishReason.STOP, stats(request, 1))]

    call = asyncio.run(raw_call(loaded_app(FakeServed(FakeEngine(script=queued))), chat_body(sse_ping_interval=0.2)))
    assert [data for _, data in call.sent[:2]] == [b":\n", b":\n"]
    assert call.body.endswith(b"data: [DONE]\n\n")


class TestNotices:
    """The clockwork by itself."""

    def test_the_first_resume_does_not_silence_those_still_parked(self) -> None:
        notices = Notices(True, 30.0, now=0.0)
        assert notices.preempted(0, 1.0) == b": preempted\n"
        assert notices.preempted(1, 1.5) == b": preempted 1\n"
        assert notices.resumed(0) == b": resumed\n"
        assert notices.due(2.9) == b"" and notices.deadline == 3.0
        assert notices.due(3.0) == b": preempt-keepalive 1\n" and notices.deadline == 5.0
        notices.ended(1)
        assert notices.due(9.0) == b""

    def test_a_late_loop_does_not_send_keepalives_in_bursts(self) -> None:
        notices = Notices(True, 30.0, now=0.0)
        notices.preempted(0, 0.0)
        assert notices.due(7.0) == b": preempt-keepalive\n"
        assert notices.due(7.5) == b"" and notices.deadline == 8.0

    def test_writing_does_not_move_keepalives_but_moves_pings(self) -> None:
        notices = Notices(True, 3.0, now=0.0)
        notices.preempted(0, 0.0)
        notices.wrote(1.9)
        assert notices.deadline == 2.0 and notices.ping(4.8) == b"" and notices.ping(4.9) == b":\n"

    def test_without_pings_nothing_is_due_until_a_park(self) -> None:
        notices = Notices(True, -1.0, now=0.0)
        assert notices.deadline == math.inf
        notices.preempted(0, 10.0)
        assert notices.deadline == 12.0

    def test_off_means_silent(self) -> None:
        notices = Notices(False, 30.0, now=0.0)
        assert notices.preempted(0, 0.0) == notices.resumed(0) == notices.due(99.0) == notices.ping(99.0) == b""
        assert notices.deadline == math.inf
