"""Where the time of one frame of a stream goes: `python -m bench.send_layers [--chats 64] [--bursts 300]`.

Each layer between a token and the socket is called by itself, on as many open streams in turn as there are chats, with
all below it: CPU microseconds of the loop's thread per call. A burst is one call for each stream; given are the 5 %
quantile and the median over the bursts, since other work on the machine only ever adds. hypercorn and the sockets are
real, and another process reads. The last rows are ours: the stream of a completion, with a `send` that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.protocol.events import Body

from bench.serving_cost import FRAME
from pyserve.generation import Generation
from pyserve.http.answers import EventStream
from pyserve.http.choice import Choice
from pyserve.http.job import Job
from pyserve.http.writer import CompletionWriter
from pyserve.models.load import load
from pyserve.text.tokenizer import Tokenizer
from pyserve.types import SamplingParams, SequenceRequest, Started, Token
from tools.make_tiny_model import make_gguf

Call = Callable[[], Awaitable[Any]]
CHUNK = b"%x\r\n" % len(FRAME) + FRAME + b"\r\n"
MESSAGE = {"type": "http.response.body", "body": FRAME, "more_body": True}
PAUSE_S = 0.001  # between bursts, for the reader to catch up

_READER = """
import selectors, socket, sys
ready, count = selectors.DefaultSelector(), int(sys.argv[2])
for _ in range(count):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall(b"GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    ready.register(connection, selectors.EVENT_READ)
while count:
    for key, _ in ready.select():
        if not key.fileobj.recv(65536):
            ready.unregister(key.fileobj)
            count -= 1
"""


def layers(server: TCPServer) -> dict[str, Call]:
    """The calls of one connection, innermost first; each holds all before it."""
    protocol: Any = server.protocol.protocol
    transport: Any = server.writer.transport
    connection = transport.get_extra_info("socket")

    async def send() -> None:
        connection._sock.send(CHUNK)

    async def write() -> None:
        transport.write(CHUNK)

    async def write_and_drain() -> None:
        server.writer.write(CHUNK)
        await server.writer.drain()

    return {
        "socket.send, with a reader": send,
        "transport.write": write,
        "StreamWriter.write and drain": write_and_drain,
        "TCPServer.protocol_send (a lock)": lambda: server.protocol_send(RawData(data=CHUNK)),
        "H11Protocol._send_h11_event (h11)": lambda: protocol._send_h11_event(h11.Data(data=FRAME)),
        "H11Protocol.stream_send": lambda: protocol.stream_send(Body(stream_id=1, data=FRAME)),
        "HTTPStream.app_send: all that `send` is": lambda: protocol.stream.app_send(MESSAGE),
    }


async def measure_hypercorn(chats: int, bursts: int) -> None:
    servers: list[TCPServer] = []
    are_open, are_done, num_open = asyncio.Event(), asyncio.Event(), 0

    async def app(scope: Any, receive: Any, send: Any, *_: Any) -> None:
        nonlocal num_open
        await send({"type": "http.response.start", "status": 200, "headers": []})
        num_open += 1
        if num_open == chats:
            are_open.set()
        await are_done.wait()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = TCPServer(app, asyncio.get_running_loop(), Config(), WorkerContext(None), {}, reader, writer)  # type: ignore[arg-type]
        servers.append(server)
        await server

    async with await asyncio.start_server(accept, "127.0.0.1", 0, backlog=chats) as listener:
        port = listener.sockets[0].getsockname()[1]
        reader = await asyncio.create_subprocess_exec(sys.executable, "-c", _READER, str(port), str(chats))
        await are_open.wait()
        calls = [layers(server) for server in servers]
        for name in calls[0]:
            report(name, await time_bursts([each[name] for each in calls], bursts))
        report("a task that waits for a future, then `send`s", await measure_woken(calls, bursts))
        are_done.set()
        for server in servers:
            server.writer.close()
        await reader.wait()


async def measure_woken(calls: list[dict[str, Call]], bursts: int) -> list[float]:
    """Seconds per stream of tasks that wait for a future each, one after the other, and then send."""
    turns: list[asyncio.Future[None]] = []

    async def stream(send: Call) -> None:
        while True:
            turns.append(asyncio.get_running_loop().create_future())
            await turns[-1]
            await send()

    def wake() -> None:
        due = turns.copy()
        turns.clear()
        for turn in due:
            turn.set_result(None)

    tasks = [asyncio.create_task(stream(list(each.values())[-1])) for each in calls]
    await asyncio.sleep(0)
    times_s = await time_turns(wake, len(tasks), bursts)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times_s


async def measure_ours(tokenizer: Tokenizer, stops: tuple[str, ...], chats: int, bursts: int) -> list[float]:
    """Seconds per stream from an event put to the message that would be sent, the wake-up of the task included."""
    generations = [Generation(1, lambda index: None) for _ in range(chats)]

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    def put() -> None:
        for number, generation in enumerate(generations):
            generation.put(Token(0, 5 + number % 80))

    tasks = []
    for generation in generations:
        response = _stream(tokenizer, stops, generation)
        tasks.append(asyncio.create_task(response({"type": "http"}, receive, send)))
        generation.put(Started(0, 0))
    await asyncio.sleep(PAUSE_S)
    times_s = await time_turns(put, chats, bursts)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times_s


def _stream(tokenizer: Tokenizer, stops: tuple[str, ...], generation: Generation) -> EventStream:
    request = SequenceRequest((1, 2, 3), SamplingParams())
    job = Job(
        id="cmpl-" + "x" * 32, requests=(request,), num_choices=1, stops=stops, min_tokens=0, is_stream=True,
        include_usage=True, continuous_usage=False, include_preemption=False, timings_per_token=False,
        return_tokens=False, return_progress=False, comments=True, ping_interval_s=30.0,
    )  # fmt: skip
    choices = [Choice(0, request, tokenizer, stops, 0)]
    return EventStream(job, choices, generation, CompletionWriter(job, choices, tokenizer, "tiny.gguf", [0]))


async def time_bursts(calls: list[Call], bursts: int) -> list[float]:
    """Seconds of CPU per call."""
    times_s = []
    for _ in range(bursts):
        await asyncio.sleep(PAUSE_S)
        started_s = time.thread_time()
        for call in calls:
            await call()
        times_s.append((time.thread_time() - started_s) / len(calls))
    return times_s


async def time_turns(wake: Callable[[], None], count: int, bursts: int) -> list[float]:
    """Seconds of CPU per task, of `wake` and the turn of the loop in which the `count` tasks that it wakes run."""
    times_s = []
    for _ in range(bursts):
        await asyncio.sleep(PAUSE_S)
        started_s = time.thread_time()
        wake()
        await asyncio.sleep(0)
        times_s.append((time.thread_time() - started_s) / count)
    return times_s


def report(name: str, times_s: list[float]) -> None:
    low_s = sorted(times_s)[len(times_s) // 20]
    print(f"| {name} | {low_s * 1e6:.2f} | {statistics.median(times_s) * 1e6:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--bursts", type=int, default=300)
    chosen = parser.parse_args()
    path = make_gguf(Path(tempfile.mkdtemp()) / "tiny.gguf")
    tokenizer = load(path, max_tokens=64, max_samples=64, max_positions=512, num_threads=1).tokenizer
    gc.collect()
    gc.freeze()  # as the server does
    print("| layer, with all below it | CPU us, 5 % quantile | median |\n| --- | --- | --- |")
    asyncio.run(measure_hypercorn(chosen.chats, chosen.bursts))
    for name, stops in (("ours, to a `send` that does nothing", ()), ("ours, with stop strings", ("zzzz", "<stop>"))):
        report(name, asyncio.run(measure_ours(tokenizer, stops, chosen.chats, chosen.bursts)))


if __name__ == "__main__":
    main()
