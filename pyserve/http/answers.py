"""Answering a generating request: events of the engine in, a stream or one JSON body out.

How it runs. The endpoint has submitted the request; the response object owns the generation from there and cancels it
however it ends: done, failed, or the client gone. A task of its own watches for the disconnect, since nothing else
would notice one while the engine is silent, or while an answer that is not streamed is still being made.

Stream. Nothing is sent before the first event: a failure there is still an HTTP status. Any other event opens the
stream, `Preempted` too (R29), and so does the first ping to one that waits for a slot. Each batch of events is written
at once, one frame per token, in the order of the events, so that notices stand where they happened and the data is the
same with and without parks (R31). After the first byte a failure is an error event and the end; a stream never ends
silently.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyserve.errors import Unavailable
from pyserve.http import sse
from pyserve.http.choice import Choice, Piece
from pyserve.http.errors import as_pyserve_error, error_object, error_response
from pyserve.http.job import Job
from pyserve.http.writer import Writer
from pyserve.types import (
    Event,
    Failed,
    Finished,
    Preempted,
    PromptLogprobs,
    PromptProgress,
    Resumed,
    Started,
    Token,
)

if TYPE_CHECKING:
    from pyserve.generation import Generation

# Where the scope keeps the server's own `send`. A stream that has begun needs nothing of what the middlewares
# wrapped around it for answers that have not.
SERVER_SEND = "pyserve.send"
CUT_TIMEOUT_S = 1.0  # for the last words to a client that may have stopped reading


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationResponse(Response, ABC):
    """The part that streams and plain answers share."""

    def __init__(self, job: Job, choices: Sequence[Choice], generation: Generation, writer: Writer) -> None:
        self.job = job
        self.choices = choices
        self.generation = generation
        self.writer = writer
        self.background = None
        self._num_open = len(choices)
        self._has_client = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                working = group.create_task(self._run(scope, receive, send))
                watching = group.create_task(_disconnect(receive))
                working.add_done_callback(lambda _: watching.cancel())
                watching.add_done_callback(partial(self._left, working))
        finally:
            self.generation.cancel()

    def _left(self, working: asyncio.Task[None], watching: asyncio.Task[None]) -> None:
        """The watch is over: the client has left, unless the watch was called off."""
        if not watching.cancelled():
            self._has_client = False
            working.cancel()

    @abstractmethod
    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer."""

    def _check_goes_on(self) -> None:
        """To be asked when no events came: an end without the sequences' last events must not look like success."""
        if self.generation.is_over:
            raise RuntimeError(f"request {self.job.id} ended without its last events")

    def _stopped(self, choice: Choice) -> None:
        """A stop string ended the sequence here, so the engine is told."""
        self._num_open -= 1
        self.generation.complete(choice.index)

    def _finish(self, choice: Choice, event: Finished) -> Piece | None:
        self._num_open -= 1
        return choice.finish(event)

    def _note(self, choice: Choice, event: Event) -> None:
        """What events say about a choice beside its text."""
        match event:
            case Started():
                choice.started(event.slot)
            case PromptProgress():
                choice.cached_tokens = event.cached
            case PromptLogprobs():
                choice.prompt_logprobs = event
            case Preempted():
                choice.preempted()
            case Resumed():
                choice.resumed()


class PlainAnswer(GenerationResponse):
    """One JSON body when every sequence has ended."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer()
        except Exception as error:
            response = error_response(as_pyserve_error(error))
        await response(scope, receive, send)

    async def _answer(self) -> Response:
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        while self._num_open:
            events = await self.generation.next_events()
            if not events:
                self._check_goes_on()
            for event in events:
                piece = self._take(event)
                if piece is not None:
                    pieces[event.index].append(piece)
        return Response(orjson.dumps(self.writer.answer(pieces)), media_type="application/json")

    def _take(self, event: Event) -> Piece | None:
        choice = self.choices[event.index]
        if isinstance(event, Failed):
            raise event.error
        if choice.is_over:
            return None
        if isinstance(event, Token):
            piece = choice.push(event)
            if choice.is_over:
                self._stopped(choice)
            return piece
        if isinstance(event, Finished):
            return self._finish(choice, event)
        self._note(choice, event)
        return None


class EventStream(GenerationResponse):
    """Server-sent events as the tokens come."""

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time()
        notices = sse.Notices(self.job.comments, self.job.ping_interval_s, now)
        events = await self.generation.next_events(notices.deadline)
        failure = next((event.error for event in events if isinstance(event, Failed)), None)
        if failure is not None:
            await error_response(as_pyserve_error(failure))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": sse.RAW_HEADERS})
        send = scope.get(SERVER_SEND, send)
        frames: list[bytes] = []
        try:
            await self._send_frames(send, events, notices, frames)
            frames.append(self.writer.close())
        except Exception as error:
            frames.append(sse.frame(error_object(as_pyserve_error(error))))
        except asyncio.CancelledError:
            await self._send_stop(send)
            raise
        await send({"type": "http.response.body", "body": b"".join(frames), "more_body": False})

    async def _send_frames(
        self, send: Send, events: Sequence[Event], notices: sse.Notices, frames: list[bytes]
    ) -> None:
        """The stream from its first events to the last. What an error leaves in `frames` goes before it."""
        time, next_events = asyncio.get_running_loop().time, self.generation.next_events
        while True:
            now = time()
            self._write_events(events, notices, now, frames)
            if now >= notices.deadline:
                frames.append(notices.due(now))
            data = b"".join(frames) or notices.ping(now)
            frames.clear()
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                notices.wrote(now)
            if not self._num_open:
                return
            events = await next_events(notices.deadline)
            if not events:
                self._check_goes_on()

    async def _send_stop(self, send: Send) -> None:
        """A stopping server cuts its streams, which must not look like their end to a client that is still there."""
        if self._has_client:
            body = sse.frame(error_object(Unavailable("the server is shutting down")))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CUT_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": body, "more_body": False})

    def _write_events(self, events: Sequence[Event], notices: sse.Notices, now: float, frames: list[bytes]) -> None:
        """The frames of a batch. Raises the error of a failed sequence, with the frames before it in `frames`."""
        for event in events:
            choice = self.choices[event.index]
            if type(event) is Token:  # by far the most
                if not choice.is_over:
                    self._write_token(choice, event, notices, frames)
            elif isinstance(event, Failed):
                raise event.error
            elif not choice.is_over:
                self._write_event(choice, event, notices, now, frames)

    def _write_token(self, choice: Choice, token: Token, notices: sse.Notices, frames: list[bytes]) -> None:
        piece = choice.push(token)
        if piece is not None:
            if not choice.has_begun:
                self._begin(choice, frames)
            frames.append(self.writer.piece(choice, piece))
        if choice.is_over:
            self._stopped(choice)
            self._end(choice, None, notices, frames)

    def _write_event(self, choice: Choice, event: Event, notices: sse.Notices, now: float, frames: list[bytes]) -> None:
        if isinstance(event, Finished):
            self._end(choice, self._finish(choice, event), notices, frames)
        else:
            self._note(choice, event)
            self._write_note(event, notices, now, frames)

    def _write_note(self, event: Event, notices: sse.Notices, now: float, frames: list[bytes]) -> None:
        if isinstance(event, Preempted):
            frames.append(notices.preempted(event.index, now))
            self._write_preemption(event.index, "preempted", frames)
        elif isinstance(event, Resumed):
            frames.append(notices.resumed(event.index))
            self._write_preemption(event.index, "resumed", frames)
        elif isinstance(event, PromptProgress) and self.job.return_progress:
            frames.append(self.writer.progress(event))

    def _write_preemption(self, index: int, state: str, frames: list[bytes]) -> None:
        if self.job.include_preemption:
            frames.append(self.writer.preemption(index, state))

    def _begin(self, choice: Choice, frames: list[bytes]) -> None:
        if not choice.has_begun:
            choice.has_begun = True
            frames.append(self.writer.begin(choice))

    def _end(self, choice: Choice, rest: Piece | None, notices: sse.Notices, frames: list[bytes]) -> None:
        self._begin(choice, frames)
        notices.ended(choice.index)
        frames.append(self.writer.end(choice, rest, is_last=not self._num_open))


def answer(job: Job, choices: Sequence[Choice], generation: Generation, writer: Writer) -> Response:
    """The response that the client asked for."""
    kind = EventStream if job.is_stream else PlainAnswer
    return kind(job, choices, generation, writer)
