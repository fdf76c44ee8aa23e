"""What the engine keeps of one sequence beside the ledger's state: its client, its clock, and its log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pyserve.generation import Generation
from pyserve.sequence import Sequence
from pyserve.types import SequenceStats, TokenLogprobs

log = logging.getLogger("pyserve.park")


def end_len_of(sequence: Sequence, context_len: int) -> int:
    """The number of tokens at which it is over for its length, in a context of so many."""
    max_tokens = sequence.request.max_tokens
    return context_len + 1 if max_tokens is None else min(context_len + 1, sequence.prompt_len + max_tokens)


@dataclass(slots=True)
class Task:
    """One sequence from submit to end. Times are time.monotonic() in seconds; 0 means not yet."""

    sequence: Sequence
    generation: Generation
    request_id: str
    submitted_s: float
    end_len: int  # number of tokens at which its sequence is over
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    n_preempt: int = 0
    preempted_at_s: float = 0.0
    preempted_s: float = 0.0
    _park_reason: str = ""
    _free_before: int = 0

    @property
    def num_sent(self) -> int:
        """Tokens sent to the client. One to stop at is not, but then this is over."""
        return self.sequence.num_generated

    @property
    def is_preempted(self) -> bool:
        return self.preempted_at_s > 0.0

    def preempted(self, now_s: float, reason: str, free_pages: int) -> None:
        """A park begins; `free_pages` is the pool before it."""
        self.n_preempt += 1
        self.preempted_at_s = now_s
        self._park_reason = reason
        self._free_before = free_pages

    def resumed(self, now_s: float, num_bytes: int, copy_ms: float, free_pages: int) -> float:
        """The sequence runs again; returns the seconds it was parked."""
        stall_s = now_s - self.preempted_at_s
        self.preempted_s += stall_s
        self.preempted_at_s = 0.0
        log.info(
            "restore request=%s index=%d tokens=%d bytes=%d copy_ms=%.1f parked_ms=%.0f free_pages=%d n=%d",
            self.request_id, self.sequence.index, len(self.sequence.tokens), num_bytes, copy_ms, stall_s * 1e3,
            free_pages, self.n_preempt,
        )  # fmt: skip
        return stall_s

    def log_park(self, tier: str, num_bytes: int, copy_ms: float, free_pages: int) -> None:
        """One line for a park that has ended, with the pool before and after."""
        log.info(
            "park request=%s index=%d reason=%s tier=%s tokens=%d bytes=%d copy_ms=%.1f free_pages=%d->%d n=%d",
            self.request_id, self.sequence.index, self._park_reason, tier, len(self.sequence.tokens), num_bytes,
            copy_ms, self._free_before, free_pages, self.n_preempt,
        )  # fmt: skip

    def stats(self, now_s: float, num_generated: int) -> SequenceStats:
        """The figures of the sequence as it ends now."""
        first_s = self.first_token_s or now_s
        started_s = self.started_s or now_s
        parked_s = self.preempted_s + (now_s - self.preempted_at_s if self.is_preempted else 0.0)
        return SequenceStats(
            prompt_tokens=self.sequence.prompt_len,
            cached_tokens=self.sequence.num_cached,
            generated_tokens=num_generated,
            prompt_ms=(first_s - started_s) * 1e3,
            generate_ms=(now_s - first_s) * 1e3,
            n_preempt=self.n_preempt,
            preempted_ms=parked_s * 1e3,
        )
