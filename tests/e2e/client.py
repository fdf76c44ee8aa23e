"""A client that keeps every line of a stream with its time, and the chats that the tests hold."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.server import Server

Body = dict[str, Any]

TOPICS = ("a lighthouse keeper", "the history of bread", "how rivers shape valleys", "a robot that learns to paint")
FILLER = (
    "Please write a long and detailed answer with many paragraphs, and do not stop early. Begin with a short overview, "
    "then go through the subject step by step. Name places, people, dates and figures wherever you can. Explain every "
    "term when it comes up for the first time, give at least three examples for each point that you make, and compare "
    "them with each other. Say what is known for certain, what is likely, and what is still a matter of debate today. "
    "Describe how opinions about it changed over the centuries and why they did. Close every section with one sentence "
    "that leads to the next, and finish the whole text with a summary, a list of questions that remain open, and some "
    "advice for a reader who wants to learn more about it."
)


@dataclass(slots=True)
class Transcript:
    """One streamed answer, line by line. Times are time.monotonic()."""

    status: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """The park and resume comments in order, keepalives left out."""
        comments = [line for _, line in self.lines if line.startswith(": ")]
        return [line for line in comments if line.startswith((": preempted", ": resumed"))]

    @property
    def events(self) -> list[Body]:
        payloads = [line.removeprefix("data: ") for _, line in self.lines if line.startswith("data: ")]
        return [json.loads(payload) for payload in payloads if payload != "[DONE]"]

    @property
    def is_done(self) -> bool:
        return any(line == "data: [DONE]" for _, line in self.lines)

    @property
    def choices(self) -> list[Body]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]

    @property
    def completion_tokens(self) -> int:
        usages = [event["usage"] for event in self.events if event.get("usage")]
        assert len(usages) == 1, "usage comes once"
        tokens: int = usages[0]["completion_tokens"]
        return tokens

    @property
    def errors(self) -> list[Body]:
        return [event["error"] for event in self.events if "error" in event]

    def times(self, line: str) -> list[float]:
        return [at for at, text in self.lines if text == line]


def chat(topic: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 7, filler: str = FILLER) -> Body:
    """The body of a streamed chat that goes on to its limit; about 200 prompt tokens with the usual filler."""
    return {
        "model": "any",
        "messages": [{"role": "user", "content": f"Tell me about {topic}. {filler}"}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def four_chats(max_tokens: int) -> list[Body]:
    """Two greedy and two sampled chats."""
    return [
        chat(topic, max_tokens=max_tokens, temperature=0.8 * (number % 2), seed=100 + number)
        for number, topic in enumerate(TOPICS)
    ]


async def stream(
    server: Server,
    body: Body,
    *,
    path: str = "/v1/chat/completions",
    stop_when: Callable[[Transcript], bool] | None = None,
    transcript: Transcript | None = None,
) -> Transcript:
    """Post a request and read its stream to the end, or until `stop_when` says to hang up.

    `transcript` is filled as the lines come, for callers who watch it meanwhile.
    """
    seen = Transcript() if transcript is None else transcript
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(300.0)) as client,
        client.stream("POST", server.url + path, json=body) as response,
    ):
        seen.status = response.status_code
        rest = b""
        async for piece in response.aiter_bytes():
            *lines, rest = (rest + piece).split(b"\n")  # not aiter_lines, which splits at more than the newline
            seen.lines.extend((time.monotonic(), line.decode()) for line in lines)
            if stop_when is not None and stop_when(seen):
                break
    return seen


def stream_one(server: Server, body: Body, *, path: str = "/v1/chat/completions") -> Transcript:
    return asyncio.run(stream(server, body, path=path))


def stream_all(server: Server, bodies: Sequence[Body], *, path: str = "/v1/chat/completions") -> list[Transcript]:
    """All at the same time."""

    async def run() -> list[Transcript]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(server, body, path=path)) for body in bodies]
        return [task.result() for task in tasks]

    return asyncio.run(run())
