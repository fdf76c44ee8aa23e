"""Four chats on a pool that holds little more than one: all finish with the text that they have alone (R1-R10, R36)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from tests.e2e.client import Transcript, four_chats, stream_all, stream_one
from tests.e2e.server import Server, running

pytestmark = pytest.mark.xdist_group("pressure")

POOL = ("--ctx-size", "1024", "--parallel", "4")
ANSWER_LEN = 600
SHORT_ANSWER_LEN = 160  # four of these with their prompts still fill the pool half as much again
VARIANTS = (
    ("--page-size", "1"),
    ("--page-size", "64"),
    ("--no-preempt-async",),
    ("--no-preempt-planner",),
    ("--preempt-every", "8"),
    ("--preempt-every", "8", "--no-preempt-async"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(*POOL) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: Server) -> list[str]:
    """The text of each of the four chats on an otherwise idle server."""
    transcripts = [stream_one(server, body) for body in four_chats(ANSWER_LEN)]
    assert not any(transcript.notices for transcript in transcripts), "alone, nothing is parked"
    return [transcript.text for transcript in transcripts]


def check_all_finished(transcripts: list[Transcript], num_tokens: int) -> None:
    for transcript in transcripts:
        assert transcript.status == 200
        assert transcript.errors == []
        assert transcript.finish_reasons == ["length"]
        assert transcript.completion_tokens == num_tokens
        assert transcript.is_done


def check_notices(transcripts: list[Transcript]) -> None:
    """At least one park, every one followed by its resume, and no blank line after a comment."""
    assert any(transcript.notices for transcript in transcripts)
    for transcript in transcripts:
        pairs = len(transcript.notices) // 2
        assert transcript.notices == [": preempted", ": resumed"] * pairs
        lines = pairwise(line for _, line in transcript.lines)
        assert not any(line.startswith((": preempt", ": resumed")) and after == "" for line, after in lines)


def test_four_long_chats_on_a_full_pool_all_finish_as_if_alone(server: Server, alone: list[str]) -> None:
    transcripts = stream_all(server, four_chats(ANSWER_LEN))
    check_all_finished(transcripts, ANSWER_LEN)
    check_notices(transcripts)
    assert [transcript.text for transcript in transcripts] == alone
    num_parks = sum(transcript.notices.count(": preempted") for transcript in transcripts)
    assert server.metric("n_preempt_total") == server.metric("n_resume_total") == num_parks


def test_every_chat_alone_would_fit_and_the_four_together_do_not(server: Server, alone: list[str]) -> None:
    del alone
    prompt_lens = []
    for body in four_chats(1):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": False}, timeout=60).json()
        prompt_lens.append(answer["usage"]["prompt_tokens"])
    assert all(150 <= prompt_len <= 300 for prompt_len in prompt_lens)
    assert max(prompt_lens) + ANSWER_LEN <= 1024 < sum(prompt_lens) + 4 * SHORT_ANSWER_LEN


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_the_texts_are_the_same_whatever_the_pages_and_the_parking(flags: tuple[str, ...], alone: list[str]) -> None:
    with running(*POOL, *flags) as server:
        transcripts = stream_all(server, four_chats(SHORT_ANSWER_LEN))
        check_all_finished(transcripts, SHORT_ANSWER_LEN)
        check_notices(transcripts)
        server.wait_until_idle()
        assert server.metric("requests_preempted") == 0
        assert server.metric("preempt_ram_bytes") == 0
    for transcript, text in zip(transcripts, alone, strict=True):
        shown = transcript.text.rstrip("\ufffd")  # the answer may end within a character
        assert len(shown) > SHORT_ANSWER_LEN
        assert text.startswith(shown)


def test_an_answer_that_is_not_streamed_tells_its_parks_in_timings_only(alone: list[str]) -> None:
    body = {**four_chats(40)[0], "stream": False}
    with running(*POOL, "--preempt-every", "8") as server:
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    answer = response.json()
    assert alone[0].startswith(answer["choices"][0]["message"]["content"].rstrip("\ufffd"))
    assert answer["timings"]["n_preempt"] == 4  # after 8, 16, 24 and 32 tokens; the fortieth is the last
    assert answer["timings"]["preempted_ms"] > 0
    assert b"preempted\n" not in response.content


def test_two_prompts_that_each_fill_the_pool_both_finish() -> None:
    """R8's example: 256 cells, two valid 252-token prompts."""
    bodies = [
        {"prompt": [first + position for position in range(252)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for first in (1000, 5000)
    ]
    with running("--ctx-size", "256", "--parallel", "2") as server:
        together = stream_all(server, [streamed(body) for body in bodies], path="/v1/completions")
        one_by_one = [stream_one(server, streamed(body), path="/v1/completions") for body in bodies]
    check_all_finished(together, 4)
    assert [transcript.text for transcript in together] == [transcript.text for transcript in one_by_one]


def streamed(body: dict[str, object]) -> dict[str, object]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
