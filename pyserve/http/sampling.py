"""How the fields of a body become the engine's sampling parameters: defaults, clamps, bans."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pyserve.errors import InvalidRequest
from pyserve.http.schema import MAX_INT, GenerationBody
from pyserve.types import SamplingParams

if TYPE_CHECKING:
    from pyserve.text.tokenizer import Tokenizer

MAX_LOGPROBS = 100
MAX_BIAS = 1e4
MAX_BIAS_CHARS = 16_384
MAX_STOPS = 256
MAX_STOP_CHARS = 16_384
TOKEN_ID = re.compile(r"\s*-?[0-9]+\s*")  # a key of logit_bias that is no text
_DEFAULTS = SamplingParams()


def sampling_params(body: GenerationBody, tokenizer: Tokenizer, num_logprobs: int | None) -> SamplingParams:
    """Sampling values out of range are clamped, as llama.cpp does; a token id out of range is an error, and so are bans
    that leave nothing to say.
    """
    biases, bans = tuple(_logit_bias(body, tokenizer)), _bans(body, tokenizer)
    if len(biases) + len(bans) >= tokenizer.vocab_size:
        _check_some_allowed(biases, bans, tokenizer.vocab_size)
    return SamplingParams(
        temperature=_clamp(body.temperature, _DEFAULTS.temperature, 0.0, 1e4),
        top_k=int(_clamp(body.top_k, _DEFAULTS.top_k, 0, MAX_INT)),
        top_p=_clamp(body.top_p, _DEFAULTS.top_p, 0.0, 1.0),
        min_p=_clamp(body.min_p, _DEFAULTS.min_p, 0.0, 1.0),
        repeat_penalty=_clamp(
            _first(body.repeat_penalty, body.repetition_penalty), _DEFAULTS.repeat_penalty, 0.01, 100.0
        ),
        repeat_last_n=_DEFAULTS.repeat_last_n if body.repeat_last_n is None else body.repeat_last_n,
        presence_penalty=_clamp(body.presence_penalty, 0.0, -100.0, 100.0),
        frequency_penalty=_clamp(body.frequency_penalty, 0.0, -100.0, 100.0),
        seed=_seed(body.seed),
        logit_bias=biases,
        banned_until=bans,
        num_logprobs=num_logprobs,
    )


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of one of the `n` choices of a prompt: the same, with a seed of its own."""
    return params if choice == 0 else replace(params, seed=(params.seed + choice) & (2**63 - 1))


def max_tokens(body: GenerationBody) -> int | None:
    """The first limit that is present, in llama.cpp's order; None runs to the end of the context."""
    for limit in (body.n_predict, body.max_completion_tokens, body.max_tokens):
        if limit is not None:
            return None if limit < 0 else limit
    return None


def num_choices(body: GenerationBody, num_slots: int) -> int:
    """`n`. Raises InvalidRequest outside 1 to the number of slots."""
    field, count = ("n", body.n) if body.n is not None else ("n_cmpl", body.n_cmpl)
    if count is None:
        return 1
    if not 1 <= count <= num_slots:
        message = f"Field '{field}': expected integer from 1 to {num_slots} (the server's slots), got {count}"
        raise InvalidRequest(message, param=field)
    return count


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """The stop strings; empty ones are none. Raises InvalidRequest for more than can be looked for beside others."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
        message = f"Field 'stop': expected at most {MAX_STOPS} strings, of {MAX_STOP_CHARS} characters together"
        raise InvalidRequest(message, param="stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def check_logprobs(field: str, count: int) -> int:
    """A number of alternatives. Raises InvalidRequest."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequest(f"Field '{field}': expected integer from 0 to {MAX_LOGPROBS}, got {count}", param=field)
    return count


def _seed(seed: int | None) -> int:
    if seed is None or seed == -1:
        return secrets.randbits(32)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest("Field 'seed': expected integer of at most 64 bits", param="seed")
    return seed & (2**63 - 1)


def _bans(body: GenerationBody, tokenizer: Tokenizer) -> tuple[tuple[int, int], ...]:
    first_allowed = MAX_INT if body.ignore_eos else body.min_tokens or 0
    return tuple((token, first_allowed) for token in sorted(tokenizer.eog_ids)) if first_allowed else ()


def _check_some_allowed(
    biases: tuple[tuple[int, float], ...], bans: tuple[tuple[int, int], ...], vocab_size: int
) -> None:
    banned = {token for token, bias in biases if bias == -math.inf} | {token for token, _ in bans}
    if len(banned) >= vocab_size:
        raise InvalidRequest("Field 'logit_bias': every token is banned, expected one that is not", param="logit_bias")


def _logit_bias(body: GenerationBody, tokenizer: Tokenizer) -> Iterator[tuple[int, float]]:
    bias = body.logit_bias
    if len(bias or ()) > tokenizer.vocab_size:
        raise InvalidRequest(f"Field 'logit_bias': expected at most {tokenizer.vocab_size} entries", param="logit_bias")
    entries = bias.items() if isinstance(bias, dict) else map(_pair, bias or ())
    biases: dict[int, float] = {}
    num_chars = 0
    for key, value in entries:
        if isinstance(key, str) and TOKEN_ID.fullmatch(key) is None:
            num_chars += len(key)
            if num_chars > MAX_BIAS_CHARS:  # thousands of texts would take the interpreter for half a minute
                message = f"Field 'logit_bias': expected texts of at most {MAX_BIAS_CHARS} characters together"
                raise InvalidRequest(message, param="logit_bias")
        for token in _bias_tokens(key, tokenizer):
            biases[token] = biases.get(token, 0.0) + _bias_value(value)
    yield from biases.items()


def _pair(entry: list[float | bool | str]) -> tuple[float | bool | str, float | bool | str]:
    if len(entry) != 2:
        raise InvalidRequest("Field 'logit_bias': expected pairs of token and bias", param="logit_bias")
    return entry[0], entry[1]


def _bias_tokens(key: float | bool | str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(key, str) and TOKEN_ID.fullmatch(key) is None:
        return tokenizer.encode(key)
    number = float(key)
    if isinstance(key, bool) or not 0 <= number < tokenizer.vocab_size or number != int(number):
        raise InvalidRequest(f"Field 'logit_bias': no token has the id {str(key)[:40]}", param="logit_bias")
    return [int(number)]


def _bias_value(value: float | bool | str) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, bool | str):
        raise InvalidRequest("Field 'logit_bias': expected a number or false as bias", param="logit_bias")
    return min(max(float(value), -MAX_BIAS), MAX_BIAS)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _clamp(value: float | None, default: float, low: float, high: float) -> float:
    return default if value is None else min(max(value, low), high)
