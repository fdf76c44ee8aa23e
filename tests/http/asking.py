"""Ways to call the app: one request in this process, a raw ASGI call with a clock, and a real server in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypercorn.asyncio import serve
from hypercorn.config import Config

from pyserve.app import App, create_app
from pyserve.settings import Settings
from tests.http.fake_engine import FakeServed, starter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]


def loaded_app(served: FakeServed | None = None, settings: Settings | None = None) -> App:
    """The app with its model loaded, without a lifespan."""
    served = served or FakeServed()
    app = create_app(settings or Settings(), starter(served))
    app.make().model = served
    return app


def ask(
    method: str,
    path: str,
    body: Any = None,
    *,
    served: FakeServed | None = None,
    settings: Settings | None = None,
    app: App | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """One request and its whole answer. `body`: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) or body is None else json.dumps(body)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app or loaded_app(served, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


def chat(body: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
    return ask("POST", CHAT, {"messages": USER, **(body or {})}, **kwargs)


def complete(body: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
    return ask("POST", COMPLETIONS, {"prompt": "Hello", **(body or {})}, **kwargs)


def frames(text: str) -> list[Any]:
    """The JSON of each data frame of a stream, with "[DONE]" as itself; comments left out."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def stream_text(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a chat's or a completion's stream."""
    choices = [one for chunk in chunks if chunk != "[DONE]" for one in chunk["choices"] if one["index"] == index]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


@dataclass
class Call:
    """What a raw ASGI call sent: (seconds since the start, status or body) in order."""

    status: int = 0
    sent: list[tuple[float, bytes]] = field(default_factory=list)
    headers_s: float = -1.0
    took_s: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.sent)

    def times_of(self, text: bytes) -> list[float]:
        return [at for at, data in self.sent for _ in range(data.count(text))]


async def raw_call(
    app: App, body: dict[str, Any], *, path: str = CHAT, leaves_after_s: float | None = None, call: Call | None = None
) -> Call:
    """A POST on the ASGI level, noted in `call` as it goes; the client may leave after some seconds."""
    call, loop = call or Call(), asyncio.get_running_loop()
    start = loop.time()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(3600.0 if leaves_after_s is None else leaves_after_s)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            call.status, call.headers_s = message["status"], loop.time() - start
        elif message.get("body"):
            call.sent.append((loop.time() - start, message["body"]))

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await app(
        scope | {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send
    )
    call.took_s = loop.time() - start
    return call


@contextmanager
def real_server(app: App, port: int) -> Iterator[str]:
    """hypercorn in a thread; its URL."""
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=_serve, args=(app, port, ready.set, stop), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"


def _serve(app: App, port: int, on_ready: Callable[[], None], stop: threading.Event) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None

    async def wait_for_stop() -> None:
        while app.state is None or app.state.model is None:
            await asyncio.sleep(0.01)
        on_ready()
        while not stop.is_set():
            await asyncio.sleep(0.02)

    asyncio.run(serve(app, config, shutdown_trigger=wait_for_stop))  # type: ignore[arg-type]
