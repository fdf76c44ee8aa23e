"""The frames and the body of an answer in OpenAI's two shapes: chat and completion.

Cost: one frame per token and stream is the hot path of the HTTP side. What does not change over a stream is encoded
once per choice; a frame that carries nothing but text is then three byte strings put together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import orjson

import pyserve
from pyserve.http import shapes, sse
from pyserve.http.choice import Choice, Piece
from pyserve.http.job import Job
from pyserve.types import PromptProgress, TokenLogprobs

if TYPE_CHECKING:
    from pyserve.text.tokenizer import Tokenizer

FINGERPRINT = f"pyserve-{pyserve.__version__}"
_MARK = "\x00text\x00"  # where a frame's text goes; JSON writes it as an escape that no other member contains


class Writer(Protocol):
    """How an endpoint words its answer. Frames are whole events of a stream."""

    def begin(self, choice: Choice) -> bytes:
        """What goes before a sequence's first text."""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """One piece of text."""

    def end(self, choice: Choice, rest: Piece | None, *, is_last: bool) -> bytes:
        """A sequence's last text and why it ended; `is_last`: of all sequences of the request."""

    def progress(self, event: PromptProgress) -> bytes:
        """How far a prompt is."""

    def preemption(self, index: int, state: str) -> bytes:
        """A park or a resume as data (R32)."""

    def close(self) -> bytes:
        """The end of a stream that went well."""

    def answer(self, pieces: Sequence[Sequence[Piece]]) -> Any:
        """The body of an answer that is not streamed, from the pieces of each sequence."""


class OpenAIWriter(ABC):
    """What chat and completion have in common."""

    chunk_object = ""
    answer_object = ""

    def __init__(self, job: Job, choices: Sequence[Choice], tokenizer: Tokenizer, alias: str) -> None:
        self.job = job
        self.choices = choices
        self.tokenizer = tokenizer
        self._members = {"created": int(time.time()), "id": job.id, "model": alias, "system_fingerprint": FINGERPRINT}
        self._wants_logprobs = job.requests[0].sampling.num_logprobs is not None
        self._is_plain = not (
            self._wants_logprobs or job.return_tokens or job.timings_per_token or job.continuous_usage
        )
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    # --- what the two shapes say themselves

    @abstractmethod
    def text_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        """The choice of a frame that carries text."""

    @abstractmethod
    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The log-probabilities of a piece."""

    @abstractmethod
    def end_choice(self, choice: Choice) -> dict[str, Any]:
        """The choice of the last frame of a sequence."""

    # --- frames

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        if self._is_plain:
            head, tail = self._templates.get(choice.index) or self._make_template(choice)
            return b"".join((head, orjson.dumps(piece.text), tail))
        entry = self._with_tokens(self.text_choice(choice, piece.text), choice, piece)
        return self._frame([entry], **self._running(choice))

    def end(self, choice: Choice, rest: Piece | None, *, is_last: bool) -> bytes:
        frames = self.piece(choice, rest) if rest is not None and rest.text else b""
        entry = self.end_choice(choice)
        if rest is not None and not rest.text:
            entry = self._with_tokens(entry, choice, rest)
        extra = self._running(choice)
        if is_last and not self.job.include_usage:
            extra["timings"] = self._timings()
        return frames + self._frame([entry], **extra)

    def progress(self, event: PromptProgress) -> bytes:
        members = {"total": event.total, "cache": event.cached, "processed": event.processed, "time_ms": event.time_ms}
        entry = self.text_choice(self.choices[event.index], "")
        return self._frame([self.without_text(entry)], prompt_progress=members)

    def without_text(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The choice of a frame that tells of progress only."""
        return entry

    def preemption(self, index: int, state: str) -> bytes:
        return self._frame([], preemption={"index": index, "state": state})

    def close(self) -> bytes:
        if not self.job.include_usage:
            return sse.DONE
        return self._frame([], usage=self._usage(), timings=self._timings()) + sse.DONE

    # --- parts

    def _frame(self, entries: list[dict[str, Any]], **extra: Any) -> bytes:
        return sse.frame({"choices": entries, **self._members, "object": self.chunk_object, **extra})

    def _make_template(self, choice: Choice) -> tuple[bytes, bytes]:
        head, _, tail = self._frame([self.text_choice(choice, _MARK)]).partition(orjson.dumps(_MARK))
        self._templates[choice.index] = head, tail
        return head, tail

    def _with_tokens(self, entry: dict[str, Any], choice: Choice, piece: Piece) -> dict[str, Any]:
        if self._wants_logprobs:
            entry["logprobs"] = self.logprobs(choice, piece)
        if self.job.return_tokens:
            entry["token_ids"] = [token.token for token in piece.tokens]
        return entry

    def _running(self, choice: Choice) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.job.continuous_usage:
            extra["usage"] = self._usage()
        if self.job.timings_per_token:
            extra["timings"] = shapes.timings([choice.stats])
        return extra

    def _usage(self) -> dict[str, Any]:
        return shapes.usage(self.choices, self.job.num_choices)

    def _timings(self) -> dict[str, Any]:
        return shapes.timings([choice.stats for choice in self.choices])

    def _answer(self, entries: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {
            "choices": entries,
            **self._members,
            "object": self.answer_object,
            "usage": self._usage(),
            "timings": self._timings(),
            **extra,
        }


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    return Piece("".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens])


class ChatWriter(OpenAIWriter):
    """`/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def begin(self, choice: Choice) -> bytes:
        entry = {"finish_reason": None, "index": choice.index, "delta": {"role": "assistant", "content": None}}
        extra = {"prompt_token_ids": choice.request.prompt} if self.job.return_tokens else {}
        frames = self._frame([entry], **extra)
        echo = self.job.echo(choice.index)
        return frames + self._frame([self.text_choice(choice, echo)]) if echo else frames

    def text_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"finish_reason": None, "index": choice.index, "delta": {"content": text}}

    def without_text(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "delta": {"role": "assistant", "content": None}}

    def end_choice(self, choice: Choice) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "index": choice.index, "delta": {}}

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"content": shapes.chat_logprobs(piece.tokens, self.tokenizer)}

    def answer(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        entries = []
        for choice, parts in zip(self.choices, pieces, strict=True):
            whole = joined(parts)
            message = {"role": "assistant", "content": self.job.echo(choice.index) + whole.text}
            entry = {"finish_reason": choice.finish_reason, "index": choice.index, "message": message}
            entries.append(self._with_tokens(entry, choice, whole))
        extra = {"prompt_token_ids": self.choices[0].request.prompt} if self.job.return_tokens else {}
        return self._answer(entries, **extra)


class CompletionWriter(OpenAIWriter):
    """`/v1/completions`. With echo, the text and the lists of log-probabilities begin with the prompt."""

    chunk_object = "text_completion"
    answer_object = "text_completion"

    def __init__(
        self, job: Job, choices: Sequence[Choice], tokenizer: Tokenizer, alias: str, num_added: Sequence[int]
    ) -> None:
        super().__init__(job, choices, tokenizer, alias)
        self._num_added = num_added  # per prompt: tokens at its start that are not echoed
        self._offsets = [0] * len(choices)  # characters sent

    def begin(self, choice: Choice) -> bytes:
        echo = self.job.echo(choice.index)
        if not self.job.echoes and not self.job.return_tokens:
            return b""
        entry = self.text_choice(choice, echo)
        if self._wants_logprobs and self.job.echoes:
            entry["logprobs"] = self._prompt_logprobs(choice)
        if self.job.return_tokens:
            entry |= {"token_ids": [], "prompt_token_ids": choice.request.prompt}
        self._offsets[choice.index] = len(echo)
        return self._frame([entry])

    def text_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text, "index": choice.index, "logprobs": None, "finish_reason": None}

    def end_choice(self, choice: Choice) -> dict[str, Any]:
        return {"text": "", "index": choice.index, "logprobs": None, "finish_reason": choice.finish_reason}

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        entries = [token.logprobs for token in piece.tokens if token.logprobs is not None]
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(piece.text)
        return shapes.completion_logprobs(entries, offset, self.tokenizer)

    def answer(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        return self._answer(
            [self._entry(choice, joined(parts)) for choice, parts in zip(self.choices, pieces, strict=True)]
        )

    def _entry(self, choice: Choice, whole: Piece) -> dict[str, Any]:
        echo = self.job.echo(choice.index)
        entry = {**self.end_choice(choice), "text": echo + whole.text}
        self._offsets[choice.index] = len(echo)
        entry = self._with_tokens(entry, choice, whole)
        if self._wants_logprobs and self.job.echoes:
            shown = self._prompt_logprobs(choice)
            entry["logprobs"] = {key: shown[key] + entry["logprobs"][key] for key in shown}
        if self.job.return_tokens:
            entry["prompt_token_ids"] = choice.request.prompt
        return entry

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        known = choice.prompt_logprobs.entries if choice.prompt_logprobs is not None else ()
        entries: list[TokenLogprobs | int] = [choice.request.prompt[0], *known]
        skipped = self._num_added[choice.index // self.job.num_choices]
        return shapes.completion_logprobs(entries[skipped:], 0, self.tokenizer)
