"""The bodies that clients send. Every field may be absent or null, unknown fields are ignored.

Types and hard limits are checked while decoding; what depends on the model or on other fields is checked by the
endpoint. `decode` words every complaint so that it names the field.
"""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request

from pyserve.errors import InvalidRequest, PyserveError

MAX_BODY_BYTES = 32 * 1024 * 1024
TOO_LARGE = f"The body is larger than {MAX_BODY_BYTES // 2**20} MiB"
BODY_SILENCE_S = 60.0
MAX_INT = 2**31 - 1

TokenLimit = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Int32 = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
Prompt = str | list[str | int | list[int]]
LogitBias = dict[str, float | bool] | list[list[float | bool | str]]


class BodyTooLarge(PyserveError):
    status = 413
    type = "invalid_request_error"


class BodyTooSlow(PyserveError):
    status = 408  # clients send the request again
    type = "invalid_request_error"


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_preemption: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What every generating endpoint takes."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n_predict: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: Count | None = None
    n: Int32 | None = None
    n_cmpl: Int32 | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: TokenLimit | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    cache_prompt: bool | None = None
    echo: bool | None = None
    return_tokens: bool | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: float | None = None
    sse_comments: bool | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions, /apply-template and .../input_tokens."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt | None = None
    logprobs: Int32 | None = None
    suffix: str | None = None
    best_of: Int32 | None = None


class NativeBody(GenerationBody, kw_only=True):
    """POST /completion, llama.cpp's own."""

    prompt: Prompt | None = None
    n_probs: Int32 | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int] | None = None


Body = TypeVar("Body")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises BodyTooLarge before more than the limit is held, and BodyTooSlow when no more comes.

    hypercorn gives a client that has vanished in the middle of its request all the time in the world.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLarge(TOO_LARGE)
    loop = asyncio.get_running_loop()
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SILENCE_S) as limit:
            async for chunk in request.stream():
                limit.reschedule(loop.time() + BODY_SILENCE_S)
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise BodyTooLarge(TOO_LARGE)
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlow(f"Nothing of the body came for {BODY_SILENCE_S:g} s") from None
    return b"".join(chunks)


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as a record. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"), type=kind)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(_malformed(body, str(error))) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None


NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "array": "list", "object": "object"}
PLACE = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)
WRONG_TYPE = re.compile(r"^Expected `([^`]+)`, got `([^`]+)`$")
TRUNCATED = "Input data was truncated"
HALF_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?=[^\\]|\\[^u])")
OUT_OF_RANGE = re.compile(r"^Expected `([^`]+)` (<=|>=) (-?\d+)")


def _malformed(body: bytes, text: str) -> str:
    """What is wrong with a body that is no JSON."""
    if not body.strip():
        return "The body is empty; expected a JSON object"
    half = HALF_SURROGATE.search(body) if text == TRUNCATED else None  # what the decoder says of one near the end
    if half is not None:
        text = f"{half[1].decode()} is only half of a UTF-16 surrogate pair (byte {half.start(1)})"
    return f"The body is not valid JSON: {text.removeprefix('JSON is malformed: ')}"


def _complaint(text: str) -> InvalidRequest:
    place = PLACE.match(text)
    if place is None:
        return InvalidRequest("The body must be a JSON object")
    what, path = place[1], place[2]
    if wrong := WRONG_TYPE.match(what):
        wanted = [NAMES.get(name, name) for name in wrong[1].split(" | ") if name != "null"]
        what = f"expected {' or '.join(wanted)}, got {NAMES.get(wrong[2], wrong[2])}"
    elif bound := OUT_OF_RANGE.match(what):
        what = f"expected {NAMES.get(bound[1], bound[1])} {bound[2]} {bound[3]}"
    else:
        what = what[:1].lower() + what[1:].replace("`", "")
    field = re.split(r"[.\[]", path, maxsplit=1)[0]
    return InvalidRequest(f"Field '{path}': {what}", param=field)
