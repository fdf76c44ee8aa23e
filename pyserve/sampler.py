"""Logits -> token ids: bias, penalties and bans, log-probabilities, then the kernel that draws.

Each row is adjusted and sampled by itself, in one fixed order of arithmetic, and its random number is a function of
(seed, position). So a row gives the same token alone, in any company, and after any number of parks (R37).

Order for a row: logit_bias, then the penalties as llama.cpp applies them (a window of `repeat_last_n` tokens, the
prompt's included), then bans, which come last so that nothing lifts them; log-probabilities are taken here; then
truncation and temperature in the kernel, which never picks minus infinity.

A row that has a NaN, or whose largest logit is not finite, is none to pick from: something is wrong with the weights or
with a kernel, and nothing is made of it but BROKEN_ROW. The kernel finds that out where it looks for the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pyserve.ops import BROKEN_ROW, sample_rows
from pyserve.types import SamplingParams, TokenLogprobs

_LOWEST = torch.finfo(torch.float32).min
_NEVER = float("-inf")
_NEVER_ENDS = 2**63
_NO_PENALTIES = (1.0, 0.0, 0.0)
_FEW = 64  # tokens that are counted one by one


_Ids = npt.NDArray[np.int64]
_Values = npt.NDArray[np.float32]


class _Weights:
    """The bias of each token that one row's biases and penalties touch, and how often it is in the window of these.

    Moving the window by a token costs the same however long it is. A token that left it may stay, with a count of 0.
    """

    def __init__(self, tokens: Sequence[int], biases: Sequence[tuple[int, float]], vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size
        self._first = self._last = 0
        self._biases: dict[int, float] = {}
        for token, bias in biases:
            if 0 <= token < vocab_size:
                self._biases[token] = self._biases.get(token, 0.0) + bias
        self._count(0, 0)

    def at(self, first: int, last: int) -> tuple[_Ids, _Values]:
        """Of the window of tokens [first, last): ids, each once, and bias and count, f32 [n, 2]. For now only."""
        num_moved = last - self._last + first - self._first
        is_forward = first >= self._first and last >= self._last
        if is_forward and num_moved <= _FEW and len(self._places) <= 2 * (last - first + len(self._biases)) + _FEW:
            for token in self._tokens[self._last : last]:
                self._add(token, 1)
            for token in self._tokens[self._first : first]:
                self._add(token, -1)
            self._first, self._last = first, last
        else:
            self._count(first, last)
        return self._ids[: len(self._places)], self._values[: len(self._places)]

    def _count(self, first: int, last: int) -> None:
        seen, counts = np.unique(np.array(self._tokens[first:last], dtype=np.int64), return_counts=True)
        is_there = (seen >= 0) & (seen < self._vocab_size)
        ids = seen[is_there].tolist()
        ids += set(self._biases).difference(ids)
        self._ids = np.array(ids, dtype=np.int64)
        self._values = np.array([(self._biases.get(id, 0.0), 0) for id in ids], dtype=np.float32).reshape(-1, 2)
        self._values[: is_there.sum(), 1] = counts[is_there]
        self._places = {id: place for place, id in enumerate(ids)}
        self._first, self._last = first, last

    def _add(self, token: int, count: int) -> None:
        place = self._places.get(token)
        if place is None:
            if not 0 <= token < self._vocab_size:
                return
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place + _FEW, np.int64)])
                self._values = np.concatenate([self._values, np.zeros((place + _FEW, 2), np.float32)])
            self._ids[place] = token
            self._values[place] = 0.0
        self._values[place, 1] += count


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
    penalties: tuple[float, float, float] = field(init=False)  # repeat, presence, frequency
    is_adjusted: bool = field(init=False)
    is_weighed: bool = field(init=False)  # adjusted by more than bans
    is_plain: bool = field(init=False)  # no log-probabilities
    _weights: _Weights | None = field(init=False, default=None)
    _bans: torch.Tensor | None = field(init=False, default=None)  # ids int64, while the same ones are banned
    _bans_end: int = field(init=False, default=0)  # number of generated tokens at which that changes

    def __post_init__(self) -> None:
        params = self.params
        self.real = (params.temperature, params.top_p, params.min_p)
        self.whole = (params.top_k, _signed(params.seed))
        penalties = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalties = penalties if params.repeat_last_n else _NO_PENALTIES
        self.is_weighed = bool(params.logit_bias) or self.penalties != _NO_PENALTIES
        self.is_adjusted = self.is_weighed or bool(params.banned_until)
        self.is_plain = params.num_logprobs is None

    def bans(self, vocab_size: int, num_tokens: int) -> torch.Tensor:
        """The ids banned when the sequence has so many tokens, int64."""
        num_generated = num_tokens - self.prompt_len
        if self._bans is None or num_generated >= self._bans_end:
            bans = [(id, end) for id, end in self.params.banned_until if num_generated < end and 0 <= id < vocab_size]
            self._bans = torch.tensor([id for id, _ in bans], dtype=torch.int64)
            self._bans_end = min((end for _, end in bans), default=_NEVER_ENDS)
        return self._bans

    def weights(self, vocab_size: int, num_tokens: int, num_known: int) -> tuple[_Ids, _Values]:
        """What its biases and penalties see when the sequence has `num_tokens` tokens, of which the first `num_known`
        are looked at: token ids, each once, and the bias and the count in the window of each, f32 [n, 2]. They change
        with the next call.
        """
        if self._weights is None:
            self._weights = _Weights(self.tokens, self.params.logit_bias, vocab_size)
        if self.penalties == _NO_PENALTIES:
            return self._weights.at(0, 0)
        last_n = self.params.repeat_last_n
        first = 0 if last_n < 0 else max(0, num_tokens - last_n)
        return self._weights.at(first, max(first, num_known))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token picked for one row, or BROKEN_ROW, and the token's log-probabilities where they were asked for."""

    token: int
    logprobs: TokenLogprobs | None


# (logits [rows, vocab], real [rows, 3], whole [rows, 3]) -> token ids [rows], as Program.sample
Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _parameters(requests: Sequence[SampleRequest]) -> tuple[torch.Tensor, torch.Tensor]:
    real = np.array([request.real for request in requests], dtype=np.float32).reshape(-1, 3)
    whole = np.array([(*request.whole, len(request.tokens)) for request in requests], dtype=np.int64).reshape(-1, 3)
    return torch.from_numpy(real), torch.from_numpy(whole)


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest], pick: Pick = sample_rows) -> list[Sampled]:
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


def has_broken_row(logits: torch.Tensor) -> bool:
    """Whether the kernel would find one in `logits`, f32 [rows, vocab]."""
    return not bool(logits.amax(dim=1).isfinite().all())  # a NaN is larger than anything there


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token` and the `num_top` most probable tokens, ties by lower id. `logits`: f32 [vocab], not
    broken.

    Probability 0 is the lowest float, which JSON can carry, and not -inf.
    """
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(neginf=_LOWEST)  # [vocab]
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
    if params.num_logprobs is None or token == BROKEN_ROW:
        return None
    return token_logprobs(logits[row], token, params.num_logprobs)


def _adjust(logits: torch.Tensor, request: SampleRequest) -> None:
    """Bias, penalties and bans of one row, f32 [vocab], in place. Token ids outside the vocabulary are passed over."""
    vocab_size, num_tokens = logits.shape[0], len(request.tokens)
    if request.is_weighed:
        _weigh(logits, request, *map(torch.from_numpy, request.weights(vocab_size, num_tokens, num_tokens)))
    if request.params.banned_until:
        logits.index_fill_(0, request.bans(vocab_size, num_tokens), _NEVER)


def _weigh(logits: torch.Tensor, request: SampleRequest, ids: torch.Tensor, values: torch.Tensor) -> None:
    """As the kernel that does it where no log-probabilities are wanted, to the bit (Weighing in ops/program.py)."""
    repeat, presence, frequency = request.penalties
    biases, counts = values.unbind(1)
    biased = logits[ids] + biases
    seen = torch.where(biased > 0, biased / repeat, biased * repeat) if repeat != 1.0 else biased
    logits[ids] = torch.where(counts > 0, seen - counts * frequency - presence, biased)


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits as any integer seed."""
    return (seed + 2**63) % 2**64 - 2**63
