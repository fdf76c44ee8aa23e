"""The OpenAI endpoints: chat, completions, and the count of a chat's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pyserve.errors import InvalidRequest
from pyserve.http import sampling
from pyserve.http.answers import answer
from pyserve.http.choice import Choice
from pyserve.http.job import Job, make_job, submit
from pyserve.http.messages import render_chat
from pyserve.http.prompts import TokenPrompt, chat_prompt, completion_prompts
from pyserve.http.schema import ChatBody, CompletionBody, decode, read_body
from pyserve.http.state import ServerState
from pyserve.http.writer import ChatWriter, CompletionWriter

LARGE_BODY_BYTES = 8192
DEFAULT_TOP_LOGPROBS = 20
Made = TypeVar("Made")


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    state: ServerState = request.app.state.server
    served = state.served
    job = await prepare(await read_body(request), lambda body: _chat_job(body, state))
    choices = make_choices(job, state)
    generation = submit(job, state)
    return answer(job, choices, generation, ChatWriter(job, choices, served.tokenizer, state.alias))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    state: ServerState = request.app.state.server
    served = state.served
    job, num_added = await prepare(await read_body(request), lambda body: _completion_job(body, state))
    choices = make_choices(job, state)
    generation = submit(job, state)
    return answer(job, choices, generation, CompletionWriter(job, choices, served.tokenizer, state.alias, num_added))


async def prepare(body: bytes, make: Callable[[bytes], Made]) -> Made:
    """Check, render and tokenise. A long text goes to a thread, since the event loop writes everybody's tokens."""
    return await asyncio.to_thread(make, body) if len(body) > LARGE_BODY_BYTES else make(body)


def make_choices(job: Job, state: ServerState) -> list[Choice]:
    """The answers of a job's sequences, empty."""
    tokenizer = state.served.tokenizer
    return [Choice(index, one, tokenizer, job.stops, job.min_tokens) for index, one in enumerate(job.requests)]


def chat_tokens(body: ChatBody, state: ServerState) -> tuple[TokenPrompt, str]:
    """The prompt of a chat, and the text that goes before the answer."""
    served = state.served
    chat = render_chat(body, served.chat_template)
    wants_echo = body.echo if body.echo is not None else not (chat.is_prefill_asked or body.stream)
    return chat_prompt(chat.text, state), chat.prefill if wants_echo else ""


def _chat_job(data: bytes, state: ServerState) -> Job:
    body = decode(data, ChatBody)
    prompt, echo = chat_tokens(body, state)
    return make_job(
        body,
        [prompt],
        state,
        prefix="chatcmpl-",
        num_logprobs=_chat_logprobs(body),
        prompt_field="messages",
        echoes=(echo,) if echo else (),
    )


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        count = DEFAULT_TOP_LOGPROBS if body.top_logprobs is None else body.top_logprobs
        return sampling.check_logprobs("top_logprobs", count)
    if body.top_logprobs:
        raise InvalidRequest("Field 'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return None


def _completion_job(data: bytes, state: ServerState) -> tuple[Job, list[int]]:
    body = decode(data, CompletionBody)
    tokenizer = state.served.tokenizer
    if body.suffix:
        raise InvalidRequest("Field 'suffix': insertion is not supported", param="suffix")
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise InvalidRequest("Field 'best_of': not supported above 'n'", param="best_of")
    prompts = completion_prompts(body.prompt, state)
    count = None if body.logprobs is None else sampling.check_logprobs("logprobs", body.logprobs)
    echoes = tuple(tokenizer.decode(prompt.tokens[prompt.num_added :]) for prompt in prompts) if body.echo else ()
    job = make_job(
        body,
        prompts,
        state,
        prefix="cmpl-",
        num_logprobs=count,
        prompt_logprobs=count if body.echo else None,
        echoes=echoes,
    )
    return job, [prompt.num_added for prompt in prompts]
