"""The whole server on the emulated device, over HTTP: four chats on a pool too small for them (R1, R27, R36)."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.client import TOPICS, Body, stream_all, stream_one
from tests.e2e.server import running
from tools.make_tiny_model import make_gguf

PATH, ANSWER_LEN = "/v1/completions", 40


def completion(prompt: str) -> Body:
    sampling = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"prompt": prompt, "max_tokens": ANSWER_LEN, **sampling, **streamed}


def test_four_chats_over_http_say_what_they_say_alone(tmp_path: Path) -> None:
    path = make_gguf(
        tmp_path / "tiny.gguf", type="Q8_0", seed=5, hidden=64, heads=2, kv_heads=1, head_dim=64, intermediate=64
    )
    chats = [completion(topic) for topic in TOPICS]
    # Two chats are more than the pool: one after another, as on a busy machine, they still meet.
    with running(
        "--device", "cuda-emulated", "--model", str(path), "--ctx-size", "96", "--parallel", "4", "--kv-type", "f16"
    ) as server:
        alone = [stream_one(server, body, path=PATH) for body in chats]
        together = stream_all(server, chats, path=PATH)
        assert [transcript.text for transcript in together] == [transcript.text for transcript in alone]
        assert all(transcript.completion_tokens == ANSWER_LEN and transcript.is_done for transcript in together)
        notices = [line for transcript in together for line in transcript.notices]
        assert notices.count(": preempted") == notices.count(": resumed") > 0
        assert server.metric("n_preempt_total") == notices.count(": preempted")
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
