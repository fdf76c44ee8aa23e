"""The official client against the HTTP side: what it parses, and which of its errors each refusal becomes."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from pyserve.settings import Settings
from pyserve.types import (
    Failed,
    Finished,
    FinishReason,
    Preempted,
    Resumed,
    SequenceRequest,
    SequenceStats,
    Started,
    Token,
)
from tests.http.asking import loaded_app, real_server
from tests.http.fake_engine import FakeEngine, FakeServed, Step, free_port, stats, word

ANSWER = "Hello there, how are you?"


@pytest.fixture(scope="module")
def served() -> FakeServed:
    return FakeServed()


@pytest.fixture(scope="module")
def client(served: FakeServed) -> Iterator[openai.OpenAI]:
    app = loaded_app(served, Settings(api_keys=("key",), alias="demo"))
    with (
        real_server(app, free_port()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=10) as client,
    ):
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], n=2, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and logprobs.content[0].token == "Hello"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    ) as chunks:
        seen = list(chunks)
    assert "".join(choice.delta.content or "" for chunk in seen for choice in chunk.choices) == ANSWER
    assert seen[-1].usage is not None and seen[-1].usage.completion_tokens == 8
    assert seen[-2].choices[0].finish_reason == "stop"


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=[{"role": "user", "content": "Hi"}]) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["aHello", "bHello"]
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["a", "Hello"]
    chunks = list(client.completions.create(model="demo", prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_refusals_become_the_clients_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x" * 2000, stream=True)
    assert caught.value.type == "exceed_context_size_error" and caught.value.code == "400"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x", temperature="hot")  # type: ignore[call-overload]
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model="demo", prompt="x")
    with pytest.raises(openai.InternalServerError) as unsupported:
        client.with_options(max_retries=3).embeddings.create(model="demo", input="x")
    assert unsupported.value.status_code == 501


def test_a_parked_stream_reads_as_any_other(client: openai.OpenAI, served: FakeServed) -> None:
    def script(index: int, request: SequenceRequest) -> list[Step]:
        parks: list[Step] = [step for _ in range(3) for step in (Preempted(index), 0.15, Resumed(index))]
        first: list[Step] = [*parks, Token(index, word("Hello")), *parks]
        return [Started(index, 0), *first, Finished(index, FinishReason.STOP, stats(request, 1, 6))]

    served.engine.script = script
    try:
        chunks = client.completions.create(
            model="demo", prompt="x", stream=True, extra_body={"sse_ping_interval": 0.05}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    finally:
        served.engine.script = None


def test_a_stream_that_fails_raises(client: openai.OpenAI, served: FakeServed) -> None:
    def script(index: int, request: SequenceRequest) -> list[Step]:
        error = RuntimeError("broken")
        return [Started(index, 0), Token(index, word("Hello")), 0.05, Failed(index, error, SequenceStats())]

    served.engine.script = script
    try:
        with pytest.raises(openai.APIError, match="Internal error"):
            list(client.completions.create(model="demo", prompt="x", stream=True))
    finally:
        served.engine.script = None
    assert isinstance(served.engine, FakeEngine)
