"""Parts of answers that several endpoints share: usage, timings, log-probabilities, sampling settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from pyserve.http.choice import Choice
from pyserve.types import SamplingParams, SequenceStats, Token, TokenLogprobs

if TYPE_CHECKING:
    from pyserve.text.tokenizer import Tokenizer

LOWEST = -3.4028234663852886e38  # stands for the logprob of probability 0, which JSON cannot write


def json_response(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")


def usage(choices: Sequence[Choice], num_choices: int) -> dict[str, Any]:
    """Tokens of the whole request; each prompt counts once, however many choices it has."""
    prompt = sum(len(choice.request.prompt) for choice in choices[::num_choices])
    cached = sum(choice.stats.cached_tokens for choice in choices[::num_choices])
    completion = sum(choice.stats.generated_tokens for choice in choices)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(stats: Sequence[SequenceStats]) -> dict[str, Any]:
    """llama.cpp's timings with the parks (R31). Of several sequences: tokens and parks added up, the longest times."""
    prompt_n = sum(one.prompt_tokens - one.cached_tokens for one in stats)
    predicted_n = sum(one.generated_tokens for one in stats)
    prompt_ms = max(one.prompt_ms for one in stats)
    predicted_ms = max(one.generate_ms for one in stats)
    return {
        "cache_n": sum(one.cached_tokens for one in stats),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1e3 * prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, predicted_n),
        "predicted_per_second": _ratio(1e3 * predicted_n, predicted_ms),
        "n_preempt": sum(one.n_preempt for one in stats),
        "preempted_ms": sum(one.preempted_ms for one in stats),
    }


def chat_logprobs(tokens: Sequence[Token], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """OpenAI's chat shape, with the token's id."""
    return [
        {
            **_entry(token.logprobs.token, token.logprobs.logprob, tokenizer),
            "top_logprobs": [_entry(other, logprob, tokenizer) for other, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]


def completion_logprobs(entries: Sequence[TokenLogprobs | int], offset: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """OpenAI's legacy shape: four lists side by side. A bare token id has no logprob: it is the first of its sequence.

    `offset` is the place of the first token in the choice's text, in characters.
    """
    shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    pending = b""
    for entry in entries:
        token, logprobs = (entry, None) if isinstance(entry, int) else (entry.token, entry)
        shape["tokens"].append(_legacy_text(token, tokenizer))
        shape["token_logprobs"].append(None if logprobs is None else _finite(logprobs.logprob))
        shape["top_logprobs"].append(
            None
            if logprobs is None
            else {_legacy_text(other, tokenizer): _finite(logprob) for other, logprob in logprobs.top}
        )
        shape["text_offset"].append(offset)
        pending += tokenizer.token_bytes(token)
        whole, pending = _whole_characters(pending)
        offset += len(whole)
    return shape


def sampling_settings(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under llama.cpp's names."""
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "n_probs": params.num_logprobs or 0,
    }


def token_bytes(token: int, tokenizer: Tokenizer) -> bytes:
    """The token's bytes; of a control token, its name."""
    return tokenizer.token_bytes(token, include_special=True)


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = token_bytes(token, tokenizer)
    return {"id": token, "token": data.decode("utf-8", "ignore"), "bytes": list(data), "logprob": _finite(logprob)}


def _legacy_text(token: int, tokenizer: Tokenizer) -> str:
    data = token_bytes(token, tokenizer)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text of `data` up to a character that may still be completed."""
    for cut in range(len(data), max(len(data) - 4, -1), -1):
        try:
            return data[:cut].decode(), data[cut:]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
