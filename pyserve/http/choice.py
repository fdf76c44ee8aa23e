"""One sequence's answer as it grows: tokens in, pieces of text out.

A piece is what can be sent: whole characters, and nothing that may still turn out to be a stop string. Its `tokens` are
those whose text begins in what was sent so far, so that log-probabilities travel with the text that they belong to and
those of a stop string never travel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pyserve.text.detokenizer import Detokenizer
from pyserve.text.stop import StopStrings
from pyserve.types import Finished, FinishReason, PromptLogprobs, SequenceRequest, SequenceStats, Token

if TYPE_CHECKING:
    from pyserve.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True):
    """Text to send and the tokens that it comes from. The text of the last piece of an answer may be empty.

    A record of msgspec for the reason that `Token` is one.
    """

    text: str
    tokens: Sequence[Token] = ()


class Choice:
    """The answer of the sequence `index`; times are `time.monotonic()` in seconds."""

    def __init__(
        self, index: int, request: SequenceRequest, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int
    ) -> None:
        self.index = index
        self.slot: int | None = None
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.is_over = False  # a finish reason is known
        self.stop_string: str | None = None
        self.is_truncated = False
        self.prompt_logprobs: PromptLogprobs | None = None
        self.has_begun = False  # its first frame was written
        self.num_tokens = 0
        self.cached_tokens = 0
        self.num_preempts = 0
        self._detokenizer = Detokenizer(tokenizer, is_continuation=True)
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._waiting: list[tuple[Token, int]] = []  # token, where its text begins
        self._made_len = 0  # characters that the tokens gave
        self._sent_len = 0  # characters in pieces
        self._stats: SequenceStats | None = None
        self._started_s = self._first_token_s = self._last_token_s = time.monotonic()
        self._parked_at_s: float | None = None
        self._parked_s = 0.0

    def started(self, slot: int) -> None:
        self.slot = slot
        self._started_s = time.monotonic()

    def preempted(self) -> None:
        self.num_preempts += 1
        self._parked_at_s = time.monotonic()

    def resumed(self) -> None:
        if self._parked_at_s is not None:
            self._parked_s += time.monotonic() - self._parked_at_s
            self._parked_at_s = None

    def push(self, token: Token) -> Piece | None:
        """The piece that `token` completes. A stop string makes the choice over, and its sequence must be cancelled."""
        self._last_token_s = time.monotonic()
        if not self.num_tokens:
            self._first_token_s = self._last_token_s
        self.num_tokens += 1
        safe = text = self._detokenizer.push(token.token)
        if self._stops is not None and self.num_tokens > self._min_tokens:
            safe, self.stop_string = self._stops.push(text)
            if self.stop_string is not None:
                self._end(FinishReason.STOP)
        if text and safe == text and not self._waiting and self._made_len == self._sent_len:
            return Piece(text, (token,))  # nothing is held back, or was; the lengths, compared only, may stay behind
        self._waiting.append((token, self._made_len))
        self._made_len += len(text)
        return self._piece(safe) if safe else None

    def finish(self, event: Finished) -> Piece | None:
        """What was held back, now that no stop string can come any more."""
        self._end(event.reason)
        self.is_truncated = event.truncated
        self._stats = event.stats
        text = self._detokenizer.flush()
        if self._stops is not None:
            text, self.stop_string = self._stops.push(text)
            if self.stop_string is None:
                text += self._stops.flush()
            else:
                self.finish_reason = FinishReason.STOP
        self._made_len = max(self._made_len, self._sent_len + len(text))
        is_whole = self.stop_string is None
        piece = self._piece(text)
        tokens = [*piece.tokens, *(token for token, _ in self._waiting)] if is_whole else piece.tokens
        return Piece(text, tokens) if text or tokens else None

    @property
    def stats(self) -> SequenceStats:
        """The engine's figures; before the end, and after a stop string, those seen from here."""
        if self._stats is not None:
            return self._stats
        parked_s = self._parked_s + (time.monotonic() - self._parked_at_s if self._parked_at_s is not None else 0.0)
        return SequenceStats(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            generated_tokens=self.num_tokens,
            prompt_ms=(self._first_token_s - self._started_s) * 1e3,
            generate_ms=(self._last_token_s - self._first_token_s) * 1e3,
            n_preempt=self.num_preempts,
            preempted_ms=parked_s * 1e3,
        )

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.is_over = True

    def _piece(self, text: str) -> Piece:
        self._sent_len += len(text)
        count = sum(begin < self._sent_len for _, begin in self._waiting)
        tokens = [token for token, _ in self._waiting[:count]]
        del self._waiting[:count]
        return Piece(text, tokens)
