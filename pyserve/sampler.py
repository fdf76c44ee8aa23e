"""Logits -> token ids: bias, penalties and bans, log-probabilities, then the kernel that draws.

Each row is adjusted and sampled by itself, in one fixed order of arithmetic, and its random number is a function of
(seed, position). So a row gives the same token alone, in any company, and after any number of parks (R37).

Order for a row: logit_bias, then the penalties as llama.cpp applies them (a window of `repeat_last_n` tokens, the
prompt's included), then bans, which come last so that nothing lifts them; log-probabilities are taken here; then
truncation and temperature in the kernel, which never picks NaN or minus infinity while there is another logit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import pyserve.ops  # noqa: F401  loads the kernels
from pyserve.types import SamplingParams, TokenLogprobs

_LOWEST = torch.finfo(torch.float32).min
_HIGHEST = torch.finfo(torch.float32).max
_NEVER = float("-inf")
_NEVER_ENDS = 2**63


@dataclass(slots=True)
class SampleRequest:
    """One row to sample. `tokens` is the prompt with what was generated so far; `prompt_len` of them are the prompt.

    It may serve every step of its sequence: `tokens` grows, and what does not change is worked out once.
    """

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    real: tuple[float, float, float] = field(init=False)  # temperature, top_p, min_p
    whole: tuple[int, int] = field(init=False)  # top_k, seed
    is_adjusted: bool = field(init=False)
    is_plain: bool = field(init=False)  # nothing but bans, and no log-probabilities
    _bans: torch.Tensor | None = field(init=False, default=None)  # ids int64, while the same ones are banned
    _bans_end: int = field(init=False, default=0)  # number of generated tokens at which that changes

    def __post_init__(self) -> None:
        params = self.params
        self.real = (params.temperature, params.top_p, params.min_p)
        self.whole = (params.top_k, _signed(params.seed))
        penalties = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        is_weighed = bool(params.logit_bias) or penalties != (1.0, 0.0, 0.0)
        self.is_adjusted = is_weighed or bool(params.banned_until)
        self.is_plain = not is_weighed and params.num_logprobs is None

    def bans(self, vocab_size: int, num_tokens: int) -> torch.Tensor:
        """The ids banned when the sequence has so many tokens, int64."""
        num_generated = num_tokens - self.prompt_len
        if self._bans is None or num_generated >= self._bans_end:
            bans = [(id, end) for id, end in self.params.banned_until if num_generated < end and 0 <= id < vocab_size]
            self._bans = torch.tensor([id for id, _ in bans], dtype=torch.int64)
            self._bans_end = min((end for _, end in bans), default=_NEVER_ENDS)
        return self._bans


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token picked for one row, and its log-probabilities where they were asked for."""

    token: int
    logprobs: TokenLogprobs | None


# (logits [rows, vocab], real [rows, 3], whole [rows, 3]) -> token ids [rows], as Program.sample
Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def pick_one_by_one(logits: torch.Tensor, real: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The picker without a program: one kernel call for each row."""
    rows = zip(logits, real.tolist(), whole.tolist(), strict=True)
    picked = [
        torch.ops.pyserve.sample_row(row, temperature, top_k, top_p, min_p, seed, position)
        for row, (temperature, top_p, min_p), (top_k, seed, position) in rows
    ]
    return torch.tensor(picked, dtype=torch.int32)


def _parameters(requests: Sequence[SampleRequest]) -> tuple[torch.Tensor, torch.Tensor]:
    real = np.array([request.real for request in requests], dtype=np.float32).reshape(-1, 3)
    whole = np.array([(*request.whole, len(request.tokens)) for request in requests], dtype=np.int64).reshape(-1, 3)
    return torch.from_numpy(real), torch.from_numpy(whole)


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest], pick: Pick = pick_one_by_one) -> list[Sampled]:
    """Pick the next token of every row. `logits`: f32 [rows, vocab], changed in place."""
    assert logits.shape[0] == len(requests), "one request for each row of the logits"
    if not requests:
        return []
    for row, request in enumerate(requests):
        if request.is_adjusted:
            _adjust(logits[row], request)
    real, whole = _parameters(requests)
    tokens: list[int] = pick(logits, real, whole).tolist()
    return [
        Sampled(token, _wanted_logprobs(logits, row, token, request.params))
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token` and the `num_top` most probable tokens, ties by lower id. `logits`: f32 [vocab].

    Probability 0 is the lowest float, which JSON can carry, and not -inf.
    """
    usable = logits.nan_to_num(nan=_NEVER, posinf=_HIGHEST, neginf=_NEVER)
    logprobs = torch.log_softmax(usable, dim=-1).nan_to_num_(nan=_LOWEST, neginf=_LOWEST)  # [vocab]
    return TokenLogprobs(token, float(logprobs[token]), _most_probable(logprobs, num_top))


def _most_probable(logprobs: torch.Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """(token id, logprob) by falling log-probability, then rising id. topk alone breaks ties as it likes."""
    num_top = min(num_top, logprobs.shape[0])
    if num_top <= 0:
        return ()
    threshold = logprobs.topk(num_top).values[-1]
    candidates = (logprobs >= threshold).nonzero().squeeze(1)  # ids, ascending
    values, order = logprobs[candidates].sort(descending=True, stable=True)
    ids: list[int] = candidates[order[:num_top]].tolist()
    return tuple(zip(ids, values[:num_top].tolist(), strict=True))


def _wanted_logprobs(logits: torch.Tensor, row: int, token: int, params: SamplingParams) -> TokenLogprobs | None:
    return None if params.num_logprobs is None else token_logprobs(logits[row], token, params.num_logprobs)


def _adjust(logits: torch.Tensor, request: SampleRequest) -> None:
    """Bias, penalties and bans of one row, f32 [vocab], in place. Token ids outside the vocabulary are passed over."""
    params, vocab_size = request.params, logits.shape[0]
    biases = [(token, bias) for token, bias in params.logit_bias if 0 <= token < vocab_size]
    if biases:
        ids, values = zip(*biases, strict=True)
        logits.index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
    _penalise(logits, request)
    if params.banned_until:
        logits.index_fill_(0, request.bans(vocab_size, len(request.tokens)), _NEVER)


def _penalise(logits: torch.Tensor, request: SampleRequest) -> None:
    params = request.params
    is_off = params.repeat_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    if is_off or params.repeat_last_n == 0:
        return
    window = request.tokens if params.repeat_last_n < 0 else request.tokens[-params.repeat_last_n :]
    counts = Counter(token for token in window if 0 <= token < logits.shape[0])
    ids = torch.tensor(list(counts), dtype=torch.int64)  # [distinct]
    times = torch.tensor(list(counts.values()), dtype=torch.float32)  # [distinct]
    seen = logits[ids]
    if params.repeat_penalty != 1.0:
        seen = torch.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    logits[ids] = seen - times * params.frequency_penalty - params.presence_penalty


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits as any integer seed."""
    return (seed + 2**63) % 2**64 - 2**63
