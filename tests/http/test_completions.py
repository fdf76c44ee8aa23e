"""/v1/completions and llama.cpp's /completion: prompts in every form, echo, legacy log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.asking import ask, complete, frames, stream_text
from tests.http.fake_engine import IM_START, FakeServed, make_tokenizer, word

ANSWER = "Hello there, how are you?"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", [(word("Hello"),)]),
        (["Hello", "A"], [(word("Hello"),), (65,)]),
        ([65, 66], [(65, 66)]),
        ([[65, 66], [67]], [(65, 66), (67,)]),
        (["Hello", [67]], [(word("Hello"),), (67,)]),
        (["Hello", 66], [(word("Hello"), 66)]),
    ],
)
def test_prompts_in_every_form(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    served = FakeServed()
    answer = complete({"prompt": prompt}, served=served).json()
    ((_, requests),) = served.engine.submitted
    assert [request.prompt for request in requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert {choice["text"] for choice in answer["choices"]} == {ANSWER}
    assert answer["object"] == "text_completion" and answer["choices"][0]["logprobs"] is None


def test_choices_of_a_prompt_stand_side_by_side() -> None:
    served = FakeServed()
    answer = complete({"prompt": [[65], [66]], "n": 2}, served=served).json()
    assert [request.prompt for request in served.engine.submitted[0][1]] == [(65,), (65,), (66,), (66,)]
    assert len(answer["choices"]) == 4 and answer["usage"]["prompt_tokens"] == 2


def test_a_stream_ends_with_an_empty_text_and_its_reason() -> None:
    chunks = frames(complete({"stream": True, "max_tokens": 3}).text)
    assert stream_text(chunks) == "Hello there,"
    assert chunks[-2]["choices"] == [{"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert chunks[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt_token_by_token(stream: bool) -> None:
    body = {"prompt": [[65, 195, 169, 66]], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    response = complete(body)
    if stream:
        chunks = frames(response.text)[:-1]
        shapes = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        shape = {key: [one for part in shapes for one in part[key]] for key in shapes[0]}
        text = stream_text(chunks)
    else:
        choice = response.json()["choices"][0]
        shape, text = choice["logprobs"], choice["text"]
    assert text == "AéBHello"
    assert shape["tokens"] == ["A", "bytes:\\xc3", "bytes:\\xa9", "B", "Hello"]
    assert shape["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert shape["top_logprobs"][0] is None and shape["top_logprobs"][3] == {"B": -0.5, "A": -3.4028234663852886e38}
    assert shape["text_offset"] == [0, 1, 1, 2, 3]


def test_echo_without_tokens_only_scores() -> None:
    choice = complete({"echo": True, "logprobs": 0, "max_tokens": 0}).json()["choices"][0]
    assert choice["text"] == "Hello" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["Hello"] and choice["logprobs"]["token_logprobs"] == [None]


def test_a_bos_that_the_server_added_is_not_echoed() -> None:
    served = FakeServed(tokenizer=make_tokenizer(adds_bos=True))
    choice = complete({"echo": True, "logprobs": 1, "max_tokens": 0}, served=served).json()["choices"][0]
    assert served.engine.submitted[0][1][0].prompt == (IM_START, word("Hello"))
    assert choice["text"] == "Hello" and choice["logprobs"]["tokens"] == ["Hello"]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_the_native_answer(path: str) -> None:
    answer = ask("POST", path, {"prompt": "Hello", "n_predict": 2, "return_tokens": True, "seed": 4}).json()
    assert answer["content"] == "Hello there" and answer["tokens"] == [word("Hello"), word(" there")]
    assert answer["stop"] is True and answer["stop_type"] == "limit" and answer["prompt"] == "Hello"
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (2, 1)
    assert answer["generation_settings"]["n_predict"] == 2 and answer["generation_settings"]["seed"] == 4
    assert ask("POST", path, {"prompt": "x", "stop": [" are"]}).json()["stopping_word"] == " are"
    assert ask("POST", path, {"prompt": "x"}).json()["stop_type"] == "eos"
    assert [one["index"] for one in ask("POST", path, {"prompt": ["x", "y"]}).json()] == [0, 1]


def test_the_native_stream_has_no_done() -> None:
    response = ask("POST", "/completion", {"prompt": "x", "stream": True, "n_probs": 1, "n_predict": 2})
    events = frames(response.text)
    assert [event["content"] for event in events] == ["Hello", " there", ""]
    assert [event["stop"] for event in events] == [False, False, True]
    assert events[0]["completion_probabilities"][0]["token"] == "Hello"
    assert "[DONE]" not in response.text
