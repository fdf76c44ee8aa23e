"""Chat completions: shapes of answers and streams, stop strings, choices, prefills, what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from pyserve.types import Finished, FinishReason, SequenceRequest, Started, Token
from tests.http.asking import USER, chat, frames, stream_text
from tests.http.fake_engine import END_OF_TEXT, IM_END, FakeEngine, FakeServed, Step, stats, word

ANSWER = "Hello there, how are you?"


def request_of(served: FakeServed, index: int = 0) -> SequenceRequest:
    return served.engine.submitted[0][1][index]


def test_a_plain_answer_has_text_usage_timings_and_the_served_name() -> None:
    answer = chat({"model": "another"}).json()
    assert answer["choices"] == [
        {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": ANSWER}}
    ]
    assert answer["model"] == "fake.gguf" and answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-") and len(answer["id"]) == 41
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["timings"]["predicted_n"] == 8 and answer["timings"]["n_preempt"] == 0


def test_a_stream_is_role_then_text_then_finish_then_done() -> None:
    response = chat({"stream": True})
    chunks = frames(response.text)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-accel-buffering"] == "no" and response.headers["cache-control"] == "no-cache"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert stream_text(chunks) == ANSWER
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2])
    assert chunks[-2]["choices"] == [{"finish_reason": "stop", "index": 0, "delta": {}}]
    assert chunks[-2]["timings"]["predicted_n"] == 8 and chunks[-1] == "[DONE]"
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    chunks = frames(chat({"stream": True, "stream_options": {"include_usage": True}}).text)
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 8
    assert "timings" in chunks[-2] and "timings" not in chunks[-3]


def test_usage_and_timings_on_every_chunk_when_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = frames(chat({"stream": True, "stream_options": options, "timings_per_token": True}).text)[1:-2]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:7]] == [1, 2, 3, 4, 5, 6, 7]
    assert all("timings" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("how", "Hello there, "),
        ([" never", " you"], "Hello there, how are"),
        ("lo the", "Hel"),
        (["zzz", ""], ANSWER),
        ("you? and more", ANSWER),
    ],
)
def test_a_stop_string_is_never_sent_not_even_half(stop: Any, text: str, stream: bool) -> None:
    served = FakeServed(FakeEngine(token_delay_s=0.002))
    response = chat({"stop": stop, "stream": stream}, served=served)
    if stream:
        chunks = frames(response.text)
        assert stream_text(chunks) == text and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert served.engine.completed == ([] if text == ANSWER else [0]) and not served.engine.cancelled


def test_min_tokens_lets_an_early_stop_string_pass() -> None:
    body = {"stop": [",", "?"], "min_tokens": 4}
    assert chat(body).json()["choices"][0]["message"]["content"] == "Hello there, how are you"


def test_characters_split_over_tokens_come_out_whole() -> None:
    def script(index: int, request: SequenceRequest) -> list[Step]:
        data = "né😀".encode() + b"\xf0\x9f"
        tokens: list[Step] = [Token(index, byte) for byte in data]
        return [Started(index, 0), *tokens, Finished(index, FinishReason.LENGTH, stats(request, len(data)))]

    served = FakeServed(FakeEngine(script=script))
    chunks = frames(chat({"stream": True, "logprobs": False}, served=served).text)
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
    assert deltas == [None, "n", "é", "😀", "\ufffd", None]


def test_choices_interleave_by_index_and_count_the_prompt_once() -> None:
    served = FakeServed()
    chunks = frames(
        chat({"n": 3, "stream": True, "seed": 5, "stream_options": {"include_usage": True}}, served=served).text
    )
    assert [stream_text(chunks, index) for index in range(3)] == [ANSWER] * 3
    assert [request_of(served, index).sampling.seed for index in range(3)] == [5, 6, 7]
    assert chunks[-2]["usage"]["completion_tokens"] == 24
    assert chunks[-2]["usage"]["prompt_tokens"] == len(request_of(served).prompt)
    answer = chat({"n": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


def test_sampling_fields_reach_the_engine_clamped() -> None:
    served = FakeServed()
    chat(
        {"temperature": -1, "top_k": -5, "top_p": 7, "min_p": 0.5, "repetition_penalty": 1.2, "presence_penalty": None,
         "seed": 2**64 - 1, "logit_bias": {"65": 5, "Hello": False}, "cache_prompt": False, "max_completion_tokens": 3,
         "max_tokens": 9},
        served=served,
    )  # fmt: skip
    request = request_of(served)
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.5)
    assert params.repeat_penalty == 1.2 and params.presence_penalty == 0.0 and params.seed == 2**63 - 1
    assert dict(params.logit_bias) == {65: 5.0, word("Hello"): float("-inf")}
    assert request.max_tokens == 3 and not request.cache_prompt
    assert request.stop_tokens == {IM_END, END_OF_TEXT}


def test_defaults_are_llama_cpps_and_seeds_differ() -> None:
    served = FakeServed()
    app_seeds = set()
    for _ in range(3):
        chat(served=served)
        params = served.engine.submitted[-1][1][0].sampling
        app_seeds.add(params.seed)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert len(app_seeds) == 3 and request_of(served).max_tokens is None


@pytest.mark.parametrize(("field", "first_allowed"), [({"ignore_eos": True}, 2**31 - 1), ({"min_tokens": 7}, 7)])
def test_ends_are_banned_for_as_long_as_asked(field: dict[str, Any], first_allowed: int) -> None:
    served = FakeServed()
    chat({**field, "max_tokens": 20}, served=served)
    assert dict(request_of(served).sampling.banned_until) == {IM_END: first_allowed, END_OF_TEXT: first_allowed}


def test_logprobs_have_openais_shape_with_bytes() -> None:
    answer = chat({"logprobs": True, "top_logprobs": 2, "max_tokens": 1}).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["id"], entry["token"], entry["bytes"], entry["logprob"]) == (256, "Hello", list(b"Hello"), -0.5)
    assert [top["token"] for top in entry["top_logprobs"]] == ["Hello", "A"]
    assert entry["top_logprobs"][1]["logprob"] == -3.4028234663852886e38
    assert "logprobs" not in chat().json()["choices"][0]


def test_logprobs_of_a_stop_string_are_not_sent() -> None:
    chunks = frames(chat({"logprobs": True, "top_logprobs": 0, "stop": " there,", "stream": True}).text)
    entries = [
        entry["token"]
        for chunk in chunks[:-1]
        for entry in (chunk["choices"][0].get("logprobs") or {}).get("content", [])
    ]
    assert entries == ["Hello"] and stream_text(chunks) == "Hello"


def test_token_ids_are_returned_when_asked_for() -> None:
    answer = chat({"return_token_ids": True, "max_tokens": 2}).json()
    assert answer["choices"][0]["token_ids"] == [word("Hello"), word(" there")]
    assert answer["prompt_token_ids"][0] == word("<|im_start|>")
    chunks = frames(chat({"return_token_ids": True, "max_tokens": 2, "stream": True}).text)
    ids = [token for chunk in chunks[:-1] for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [word("Hello"), word(" there")]


def test_no_tokens_asked_for_gives_an_empty_answer() -> None:
    answer = chat({"max_tokens": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "" and answer["choices"][0]["finish_reason"] == "length"


def rendered(served: FakeServed) -> str:
    return served.tokenizer.decode(request_of(served).prompt, include_special=True)


def test_messages_are_rendered_developer_as_system_and_parts_joined() -> None:
    served = FakeServed()
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    chat(
        {"messages": [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]}, served=served
    )
    assert rendered(served) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWh\nill<|im_end|>\n<|im_start|>assistant\n"
    )


PREFILLED = [*USER, {"role": "assistant", "content": "Sure:"}]


@pytest.mark.parametrize(
    ("extra", "prompt_end", "content"),
    [
        ({}, "<|im_start|>assistant\nSure:", "Sure:" + ANSWER),
        ({"echo": False}, "<|im_start|>assistant\nSure:", ANSWER),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nSure:", ANSWER),
        ({"continue_final_message": True, "echo": True}, "<|im_start|>assistant\nSure:", "Sure:" + ANSWER),
        ({"add_generation_prompt": True}, "Sure:<|im_end|>\n<|im_start|>assistant\n", ANSWER),
    ],
)
def test_a_last_assistant_message_is_continued(extra: dict[str, Any], prompt_end: str, content: str) -> None:
    served = FakeServed()
    answer = chat({"messages": PREFILLED, **extra}, served=served).json()
    assert rendered(served).endswith(prompt_end)
    assert answer["choices"][0]["message"]["content"] == content


def test_a_stream_leaves_the_prefill_out_and_an_empty_one_is_dropped() -> None:
    assert stream_text(frames(chat({"messages": PREFILLED, "stream": True}).text)) == ANSWER
    assert stream_text(frames(chat({"messages": PREFILLED, "stream": True, "echo": True}).text)) == "Sure:" + ANSWER
    served = FakeServed()
    chat({"messages": [*USER, {"role": "assistant", "content": ""}]}, served=served)
    assert rendered(served).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_fields_that_clients_send_along_are_ignored() -> None:
    body = {
        "user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "parallel_tool_calls": False,
        "reasoning_effort": "low", "tools": [], "tool_choice": "auto", "functions": None, "grammar": "",
        "response_format": {"type": "text"}, "json_schema": None, "modalities": ["text"], "prediction": None,
        "stop": None, "verbosity": "low",
        "stream_options": {"include_obfuscation": True}, "samplers": ["top_k"], "id_slot": -1, "logit_bias": [],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert chat(body).status_code == 200
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat({"tools": [tool], "tool_choice": "none"}).status_code == 200


def test_progress_of_the_prompt_is_told_when_asked_for() -> None:
    chunks = frames(chat({"stream": True, "return_progress": True}).text)
    progress = chunks[0]["prompt_progress"]
    assert progress["processed"] == progress["total"] and chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert stream_text(chunks) == ANSWER
