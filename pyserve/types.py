"""Plain records that cross module borders: what a request asks, what the engine tells, what the endpoints show."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from pyserve.histogram import Histogram


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the ones that OpenAI clients know."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence picks its tokens. Zero switches `top_k`, `min_p`, `num_logprobs` and the penalties off."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens; -1 means all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added logit); -inf bans the token
    banned_until: tuple[tuple[int, int], ...] = ()  # (token id, number of generated tokens before which it is banned)
    num_logprobs: int | None = None  # alternatives reported with each token; None reports nothing


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One prompt and how to continue it. `max_tokens` None runs to the end of the context."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()  # end the sequence, and are not part of its text
    prompt_logprobs: int | None = None  # alternatives reported for each prompt token; None reports nothing
    cache_prompt: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, after penalties and bias, before temperature and truncation."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most probable first


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """What one sequence cost. Times in milliseconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    n_preempt: int = 0
    preempted_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has a slot. Headers of a stream may go out."""

    index: int
    slot: int


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token. A token in `stop_tokens` is never sent. One is made for every token of every stream, which
    a frozen dataclass takes five times as long for.
    """

    index: int
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from the second on, sent once, before the first `Token`."""

    index: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is: `processed` of `total` tokens are computed, `cached` of them came from the prompt cache."""

    index: int
    total: int
    cached: int
    processed: int
    time_ms: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence is parked. A `Resumed` or the end of the sequence follows."""

    index: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The sequence runs again."""

    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that ended well. `truncated`: the context was full."""

    index: int
    reason: FinishReason
    stats: SequenceStats
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that could not go on."""

    index: int
    error: Exception
    stats: SequenceStats


Event = Started | Token | PromptLogprobs | PromptProgress | Preempted | Resumed | Finished | Failed


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot as `/slots` shows it."""

    id: int
    state: str = "idle"  # idle, prompt, generating, preempting, preempted, restoring
    is_processing: bool = False
    is_preempted: bool = False
    n_preempt: int = 0
    request_id: str | None = None
    prompt_index: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    processed_tokens: int = 0  # prompt tokens computed by this task
    generated_tokens: int = 0
    remaining_tokens: int = -1
    cells: int = 0  # token positions held in the pool
    pages: tuple[int, ...] = ()
    tier: str | None = None  # where the parked state is: ram, disk, recompute
    parked_bytes: int = 0
    parked_ms: float = 0.0
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's state at the end of one iteration, published for the endpoints, which never touch the engine."""

    slots: tuple[SlotSnapshot, ...] = ()
    num_waiting: int = 0
    page_size: int = 0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # held by the prompt cache only
    held_pages: int = 0  # held by sequences
    transfer_pages: int = 0  # held for a copy in flight
    requests_preempted: int = 0
    preempt_ram_bytes: int = 0
    preempt_disk_bytes: int = 0
    last_step_at_s: float = 0.0  # time.monotonic()
    is_stuck: bool = False
    cache_map: bytes = b""  # one per page: not 0 where the prompt cache knows the page, held by a sequence or not
    parked_slots: tuple[int, ...] = ()  # in the order in which their sequences come back


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while the engine runs. Cells and tokens are the same thing here."""

    num_slots: int
    page_size: int
    num_pages: int
    pool_tokens: int
    context_len: int  # tokens that one sequence may have
    park_budget_bytes: int
    park_budget_tokens: int
    page_bytes: int
    is_async: bool
    is_pinned: bool
    kv_type: str
    num_threads: int
    isa: str
    max_queue: int
    tiers: tuple[str, ...] = ("ram", "recompute")  # where parked state may be, best first; none: parking is off
    copy_tuning: Mapping[str, int] = field(default_factory=dict)  # how pages are copied, as measured at the start


@dataclass(slots=True)
class Counters:
    """Totals since start, written by the engine and read by `/metrics`. Seconds, tokens, counts."""

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    generated_tokens: int = 0
    generate_s: float = 0.0
    cached_tokens: int = 0
    steps: int = 0
    busy_slots: int = 0  # summed over the steps, parked slots left out
    longest_sequence: int = 0
    preempts: int = 0
    resumes: int = 0
    recomputes: int = 0
    copies_failed: int = 0  # parks and restores that did not go well, or not in time
    hash_mismatches: int = 0  # restores of pages that were not what was parked
    parked_bytes: int = 0
    restored_bytes: int = 0
    moved_bytes: int = 0  # parked state that went from memory to disk
    failed: int = 0
    cancelled: int = 0
    finished: int = 0
    # queue_s, ttft_s, inter_token_s, e2e_s, step_s, preempted_s, park_copy_s, restore_copy_s
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def count_step(self, num_rows: int, longest_len: int, step_s: float) -> None:
        """A step of so many sequences, the longest of them with so many tokens."""
        self.steps += 1
        self.busy_slots += num_rows
        self.longest_sequence = max(self.longest_sequence, longest_len)
        self.observe("step_s", step_s)

    def observe(self, name: str, value_s: float, count: int = 1) -> None:
        """Count a value, in seconds, in the histogram of that name."""
        histogram = self.histograms.get(name)
        if histogram is None:
            histogram = self.histograms[name] = Histogram()
        histogram.observe(value_s, count)

    def observe_all(self, name: str, values_s: list[float]) -> None:
        """Count many values, most of them the same: the rows of a step come at the same time."""
        for value_s, count in collections.Counter(values_s).items():
            self.observe(name, value_s, count)
