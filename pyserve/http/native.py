"""POST /completion, llama.cpp's own completion: its fields, its shapes, no [DONE] at the end of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyserve.http import sampling, shapes, sse
from pyserve.http.answers import answer
from pyserve.http.choice import Choice, Piece
from pyserve.http.job import Job, make_job, submit
from pyserve.http.openai import make_choices, prepare
from pyserve.http.prompts import completion_prompts
from pyserve.http.schema import NativeBody, decode, read_body
from pyserve.http.state import ServerState
from pyserve.http.writer import joined
from pyserve.types import FinishReason, PromptProgress


async def completion(request: Request) -> Response:
    """POST /completion and /completions."""
    state: ServerState = request.app.state.server
    job = await prepare(await read_body(request), lambda body: _job(body, state))
    choices = make_choices(job, state)
    generation = submit(job, state)
    return answer(job, choices, generation, NativeWriter(job, choices, state))


def _job(data: bytes, state: ServerState) -> Job:
    body = decode(data, NativeBody)
    prompts = completion_prompts(body.prompt, state)
    count = sampling.check_logprobs("n_probs", body.n_probs) if body.n_probs else None
    return make_job(body, prompts, state, prefix="cmpl-", num_logprobs=count)


class NativeWriter:
    """llama.cpp's objects: one per token in a stream, one per sequence at the end."""

    def __init__(self, job: Job, choices: Sequence[Choice], state: ServerState) -> None:
        self._job = job
        self._choices = choices
        self._tokenizer = state.served.tokenizer
        self._alias = state.alias

    def begin(self, choice: Choice) -> bytes:
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        return sse.frame(self._partial(choice, piece))

    def end(self, choice: Choice, rest: Piece | None, *, is_last: bool) -> bytes:
        frames = self.piece(choice, rest) if rest is not None else b""
        return frames + sse.frame(self._final(choice, Piece("")))

    def progress(self, event: PromptProgress) -> bytes:
        members = {"total": event.total, "cache": event.cached, "processed": event.processed, "time_ms": event.time_ms}
        return sse.frame({**self._partial(self._choices[event.index], Piece("")), "prompt_progress": members})

    def preemption(self, index: int, state: str) -> bytes:
        return sse.frame({"index": index, "stop": False, "content": "", "preemption": {"index": index, "state": state}})

    def close(self) -> bytes:
        return b""

    def answer(self, pieces: Sequence[Sequence[Piece]]) -> Any:
        """One object, or a list of them for several sequences."""
        finals = [self._final(choice, joined(parts)) for choice, parts in zip(self._choices, pieces, strict=True)]
        return finals[0] if len(finals) == 1 else finals

    def _partial(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        partial: dict[str, Any] = {
            "index": choice.index,
            "content": piece.text,
            "tokens": [token.token for token in piece.tokens],
            "stop": False,
            "id_slot": choice.slot,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(choice.request.prompt),
        }
        if self._job.timings_per_token:
            partial["timings"] = shapes.timings([choice.stats])
        return partial | self._probabilities(choice, piece)

    def _final(self, choice: Choice, whole: Piece) -> dict[str, Any]:
        stats, prompt = choice.stats, choice.request.prompt
        return {
            "index": choice.index,
            "content": whole.text,
            "tokens": [token.token for token in whole.tokens] if self._job.return_tokens else [],
            "id_slot": choice.slot,
            "stop": True,
            "model": self._alias,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": len(prompt),
            "generation_settings": self._settings(choice),
            "prompt": self._tokenizer.decode(prompt, include_special=True),
            "has_new_line": "\n" in whole.text,
            "truncated": choice.is_truncated,
            "stop_type": _stop_type(choice),
            "stopping_word": choice.stop_string or "",
            "tokens_cached": len(prompt) + choice.num_tokens,
            "timings": shapes.timings([stats]),
        } | self._probabilities(choice, whole)

    def _probabilities(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if choice.request.sampling.num_logprobs is None or not piece.tokens:
            return {}
        return {"completion_probabilities": shapes.chat_logprobs(piece.tokens, self._tokenizer)}

    def _settings(self, choice: Choice) -> dict[str, Any]:
        limit = -1 if choice.request.max_tokens is None else choice.request.max_tokens
        return shapes.sampling_settings(choice.request.sampling) | {
            "stop": list(self._job.stops),
            "max_tokens": limit,
            "n_predict": limit,
            "stream": self._job.is_stream,
            "timings_per_token": self._job.timings_per_token,
        }


def _stop_type(choice: Choice) -> str:
    if choice.stop_string is not None:
        return "word"
    return "eos" if choice.finish_reason is FinishReason.STOP else "limit"
