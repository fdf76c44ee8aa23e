"""Requests that cannot be served: each gets a status, one error shape, and a message that names the field."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from pyserve.errors import ContextExceeded, StepFailed, Unavailable
from pyserve.types import Failed, SequenceRequest, SequenceStats, Started
from tests.http.asking import CHAT, COMPLETIONS, USER, ask, chat, complete, frames
from tests.http.fake_engine import FakeEngine, FakeServed, Step

LONG = "exceed_context_size_error"
ANYTHING: tuple[Any, ...] = ("text", 7, 1.5, True, [1], ["a"], {"a": 1}, [[1]], [{}])
NUMBER = (7, 1.5)
WHOLE = (7,)
TRUTH = (True,)
# Field -> the values of ANYTHING that are of its type; the others are an error that names it.
FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": NUMBER, "top_p": NUMBER, "min_p": NUMBER, "repeat_penalty": NUMBER, "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "sse_ping_interval": NUMBER,
    "top_k": WHOLE, "seed": WHOLE, "max_tokens": WHOLE, "max_completion_tokens": WHOLE, "n_predict": WHOLE,
    "min_tokens": WHOLE, "repeat_last_n": WHOLE,
    "stream": TRUTH, "ignore_eos": TRUTH, "cache_prompt": TRUTH, "echo": TRUTH, "return_tokens": TRUTH,
    "return_token_ids": TRUTH, "timings_per_token": TRUTH, "return_progress": TRUTH, "sse_comments": TRUTH,
    "stream_options": ({"a": 1},), "stop": ("text", ["a"]), "n": (), "n_cmpl": (), "logit_bias": ({"a": 1},),
    "response_format": (), "grammar": (), "json_schema": (),
}  # fmt: skip
CHAT_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (), "logprobs": TRUTH, "top_logprobs": (), "tools": (), "functions": (), "modalities": (),
    "tool_choice": ("text", {"a": 1}), "function_call": ("text", {"a": 1}), "chat_template_kwargs": ({"a": 1},),
    "add_generation_prompt": TRUTH, "continue_final_message": (), "reasoning_effort": ("text",),
}  # fmt: skip
COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": ("text", [1], ["a"], [[1]]), "logprobs": WHOLE, "suffix": (), "best_of": (),
}  # fmt: skip


def wrong_values(fields: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [
        (field, value)
        for field, right in fields.items()
        for value in ANYTHING
        if not any(type(value) is type(one) and value == one for one in right)
    ]


def check(response: Any, status: int, kind: str = "invalid_request_error") -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, status, kind), error
    assert isinstance(error["message"], str) and error["message"] and "\n" not in error["message"]
    return error


def test_every_field_of_a_wrong_type_is_named_in_a_400() -> None:
    served = FakeServed()
    for path, fields in ((CHAT, FIELDS | CHAT_FIELDS), (COMPLETIONS, FIELDS | COMPLETION_FIELDS)):
        for field, value in wrong_values(fields):
            base = {"messages": USER} if path == CHAT else {"prompt": "x"}
            accepted = {"n": 1, "n_cmpl": 1, "best_of": 1}.get(field)
            if value is True and accepted is None and fields[field] == ():
                continue
            error = check(ask("POST", path, {**base, field: value}, served=served), 400)
            assert field in error["message"], (field, value, error)
            assert error["param"] in (field, None, "messages"), error
    assert served.engine.submitted == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_is_absent_for_every_field(path: str) -> None:
    fields = FIELDS | (CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS)
    base = {"messages": USER} if path == CHAT else {"prompt": "x"}
    assert ask("POST", path, {**dict.fromkeys(fields), **base}).status_code == 200


HOSTILE = [
    b"", b"{", b"nonsense", b"[]", b"null", b'"text"', b"{} {}", b'{"messages": NaN}', b"\xff\xfe{}", b'{"a": "\xff"}',
    b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": ' + b'{"a":' * 100_000,
    b'{"temperature": 1e999, "messages": []}',
    b'{"seed": 1' + b"0" * 5000 + b', "messages": [{"role": "user", "content": "x"}]}',
    b'{"max_tokens": 99999999999999999999, "messages": [{"role": "user", "content": "x"}]}',
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/completion"])
def test_hostile_bodies_are_the_clients_fault(path: str, body: bytes) -> None:
    response = ask("POST", path, body)
    if path == "/tokenize" and response.status_code == 200:
        assert body.startswith(b'{"') and "tokens" in response.json()  # what is wrong in it is not a field of this one
        return
    check(response, 400)


def test_a_byte_order_mark_does_no_harm() -> None:
    assert ask("POST", COMPLETIONS, b'\xef\xbb\xbf{"prompt": "x"}').status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'{"prompt": "a \ud83d"}', r"\ud83d is only half of a UTF-16 surrogate pair (byte 14)"),
        (rb'{"prompt": "\\\ud83d"}', r"\ud83d is only half of a UTF-16 surrogate pair (byte 14)"),
        (rb'{"prompt": "\ud83d, and so on"}', "surrogate pair"),
        (rb'{"prompt": "\ude00"}', "surrogate pair"),
        (rb'{"prompt": "\ud83d\ude00', "truncated"),
        (rb'{"prompt": "\\ud83d"', "truncated"),
        (b" \n", "The body is empty"),
    ],
)
def test_what_is_wrong_with_malformed_json_is_said(body: bytes, said: str) -> None:
    assert said in check(ask("POST", COMPLETIONS, body), 400)["message"]


def test_a_body_beyond_the_limit_is_refused_by_its_header_and_by_its_size() -> None:
    check(ask("POST", CHAT, b"{}", headers={"content-length": str(2**40)}), 413)
    check(ask("POST", COMPLETIONS, b'"' + b"x" * (33 * 2**20) + b'"'), 413)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n": 0}, "'n'"),
        ({"n": 5}, "'n'"),
        ({"max_tokens": -2}, "'max_tokens'"),
        ({"max_tokens": 2**31}, "'max_tokens'"),
        ({"min_tokens": -1}, "'min_tokens'"),
        ({"seed": 2**64}, "'seed'"),
        ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"logprobs": True, "top_logprobs": 101}, "'top_logprobs'"),
        ({"logprobs": True, "top_logprobs": -1}, "'top_logprobs'"),
        ({"logit_bias": {"99999": 1}}, "'logit_bias'"),
        ({"logit_bias": [[-1, 1]]}, "'logit_bias'"),
        ({"logit_bias": {"-1": 1}}, "'logit_bias': no token has the id -1"),
        ({"logit_bias": [[" 99999 ", 1]]}, "'logit_bias'"),
        ({"logit_bias": {"9" * 500: 1}}, "'logit_bias'"),
        ({"logit_bias": {"a" * 16_385: 1}}, "'logit_bias'"),
        ({"logit_bias": {f"{n} {'a' * 1000}": 1 for n in range(17)}}, "'logit_bias'"),
        ({"logit_bias": [[1, 1]] * 1000}, "'logit_bias'"),
        ({"logit_bias": [[1.5, 1]]}, "'logit_bias'"),
        ({"logit_bias": [[1]]}, "'logit_bias'"),
        ({"logit_bias": {"1": True}}, "'logit_bias'"),
        ({"stop": ["a"] * 257}, "'stop'"),
        ({"stop": "a" * 16_385}, "'stop'"),
        ({"response_format": {"type": "sound"}}, "'response_format"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "'response_format'"),
        ({"grammar": 'root ::= "a"'}, "'grammar'"),
        ({"json_schema": {"type": "object"}}, "'json_schema'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools'"),
        ({"functions": [{"name": "f"}]}, "'functions'"),
        ({"modalities": ["text", "audio"]}, "'modalities'"),
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [*USER, *[{"role": "assistant", "content": "a"}] * 2]}, "messages"),
        ({"continue_final_message": True}, "'continue_final_message'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "'continue_final_message'"),
        ({"stream_options": {"include_usage": 1}}, "'stream_options.include_usage'"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_served_name_their_field(body: dict[str, Any], named: str) -> None:
    served = FakeServed()
    assert named in check(chat({"stream": True, **body}, served=served), 400)["message"]
    assert served.engine.submitted == []


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (None, "'prompt'"), ("", "'prompt'"), ([], "'prompt'"), ([[]], "'prompt[0]'"), (["x", ""], "'prompt[1]'"),
        ([99999], "'prompt'"), ([[65], [-1]], "'prompt[1]'"), (["x", [65], 66], "'prompt[1]'"),
    ],
)  # fmt: skip
def test_one_bad_prompt_refuses_the_request_before_any_of_it_starts(prompt: Any, named: str) -> None:
    """R30."""
    served = FakeServed()
    assert named in check(complete({"prompt": prompt, "stream": True}, served=served), 400)["message"]
    assert served.engine.submitted == []


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion"])
@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ([[65]] * 261, "invalid_request_error"),
        (["a"] * 261, "invalid_request_error"),
        ("a" * 100_000, LONG),
        (["a", "a" * 100_000], LONG),
        ([65, "a" * 100_000], LONG),
    ],
)
def test_a_prompt_that_no_queue_or_context_can_hold_is_not_tokenised(path: str, prompt: Any, kind: str) -> None:
    """Millions of prompts in one body took all memory, and the loop for a minute."""
    served = FakeServed()
    with patch.object(served.tokenizer, "encode", side_effect=AssertionError("tokenised")):
        check(ask("POST", path, {"prompt": prompt}, served=served), 400, kind)
        error = check(chat({"messages": [{"role": "user", "content": "a" * 100_000}]}, served=served), 400, LONG)
    assert 1024 < error["n_prompt_tokens"] < 100_000 and error["n_ctx"] == 1024 and error["param"] == "messages"


def test_bans_that_leave_no_token_are_refused() -> None:
    tokenizer = FakeServed().tokenizer
    allowed = min(tokenizer.eog_ids)
    bans = [[token, False] for token in range(tokenizer.vocab_size) if token != allowed]
    assert chat({"logit_bias": bans, "max_tokens": 1}).status_code == 200
    for more in ({"logit_bias": [*bans, [allowed, False]]}, {"logit_bias": bans, "ignore_eos": True}):
        assert "every token is banned" in check(chat(more), 400, "invalid_request_error")["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_keep_their_status_also_for_streams(stream: bool) -> None:
    error = check(complete({"prompt": "x" * 2000, "stream": stream}), 400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"], error["param"]) == (2000, 1024, "prompt")
    for prompt in (["ok", [5] * 2000], ["ok", "x" * 2000], ["ok", "x" * 200_000]):
        error = check(complete({"prompt": prompt, "n": 2, "stream": stream}), 400, "exceed_context_size_error")
        assert error["message"].startswith("Field 'prompt[1]': ") and error["param"] == "prompt"
    long_chat = {"messages": [{"role": "user", "content": "x" * 2000}], "stream": stream}
    assert check(chat(long_chat), 400, "exceed_context_size_error")["param"] == "messages"
    full = chat({"stream": stream}, served=FakeServed(FakeEngine(max_queue=0)))
    check(full, 503, "unavailable_error")
    assert full.headers["retry-after"] == "1"


def failing(error: Exception, *, is_started: bool) -> FakeServed:
    def script(index: int, request: SequenceRequest) -> list[Step]:
        start: list[Step] = [Started(index, 0), 0.01] if is_started else []
        return [*start, Failed(index, error, SequenceStats())]

    return FakeServed(FakeEngine(script=script))


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_byte_is_a_status(stream: bool) -> None:
    error = ContextExceeded("no room", n_prompt_tokens=5, n_ctx=4)
    check(chat({"stream": stream}, served=failing(error, is_started=False)), 400, "exceed_context_size_error")


def test_a_failure_in_a_stream_is_an_error_event_and_the_end() -> None:
    for error, code in ((StepFailed("the step failed: out of memory"), 500), (Unavailable("shutting down"), 503)):
        response = chat({"stream": True}, served=failing(error, is_started=True))
        (last,) = frames(response.text)
        assert response.status_code == 200 and last["error"]["code"] == code and last["error"]["message"] == str(error)


def test_an_error_of_our_own_shows_no_internals(caplog: pytest.LogCaptureFixture) -> None:
    response = chat(served=failing(KeyError("secret"), is_started=True))
    assert "secret" not in check(response, 500, "server_error")["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/nope", "/v1", "/health/", "/slots/1/2", "*", "/v1/chat/completions%20"])
def test_unknown_paths_are_404(path: str) -> None:
    for method in ("GET", "POST"):
        assert check(ask(method, path), 404, "not_found_error")["message"] == "File Not Found"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "OPTIONS, POST"),
        ("DELETE", "/health", "GET, HEAD, OPTIONS"),
        ("POST", "/", "GET, HEAD, OPTIONS"),
        ("PUT", "/props", "GET, HEAD, OPTIONS, POST"),
        ("POST", "/v1/models/x/y", "GET, HEAD, OPTIONS"),
        ("BREW", "/slots/" + "9" * 5000, "OPTIONS, POST"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_405_and_says_which_it_takes(
    method: str, path: str, allowed: str
) -> None:
    response = ask(method, path)
    assert method in check(response, 405)["message"] and allowed in response.json()["error"]["message"]
    assert response.headers["allow"] == allowed
    for one in allowed.split(", "):
        assert ask(one, path, {}).status_code != 405


@pytest.mark.parametrize("path", ["/v1/embeddings", "/props", "/slots/0?action=erase"])
def test_what_is_not_built_says_so(path: str) -> None:
    assert ask("POST", path, {}).headers["x-should-retry"] == "false"
    check(ask("POST", path, {}), 501, "not_supported_error")
