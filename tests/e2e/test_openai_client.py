"""The official client against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.client import TOPICS
from tests.e2e.server import Server, running

pytestmark = pytest.mark.xdist_group("openai")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--ctx-size", "512", "--parallel", "4", "--api-key", "secret", "--alias", "demo") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def question(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_a_chat_answers_the_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=question("Which city is the capital of Germany?"), max_tokens=24, temperature=0
    )
    assert "Berlin" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.model == "demo"
    assert answer.usage is not None and answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_stream_gives_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=question("Count to ten."), max_tokens=40, temperature=0, seed=1
    )
    pieces = client.chat.completions.create(
        model="demo",
        messages=question("Count to ten."),
        max_tokens=40,
        temperature=0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert len(chunks) > 5


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == answer.choices[1].text != ""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_a_wrong_key_and_a_prompt_that_cannot_fit_raise_the_clients_own_errors(
    server: Server, client: openai.OpenAI
) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="demo", messages=question("Hello"), max_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=question("word " * 600), stream=True)
    assert caught.value.type == "exceed_context_size_error"


def test_four_streams_on_a_full_pool_reach_the_client_whole(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, topic: str) -> tuple[str, list[str]]:
        pieces = await client.chat.completions.create(
            model="demo",
            messages=question(f"Write a long story about {topic}."),
            max_tokens=200,
            temperature=0.8,
            seed=3,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in pieces]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return text, [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]

    async def run() -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            together = await asyncio.gather(*(one(client, topic) for topic in TOPICS))
            return list(together), [await one(client, topic) for topic in TOPICS]

    together, alone = asyncio.run(run())
    assert together == alone
    assert [reasons for _, reasons in together] == [["length"]] * 4
