"""The command line: `python -m pyserve`. Flags, the check of the model, hypercorn, signals and the drain.

Stop signals come here, not to hypercorn, whose graceful shutdown has no limit while streams are open. The first one
drains: new requests get a 503, running ones finish until --drain-timeout and are then ended with an error event. The
second one stops at once, the third kills.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hypercorn.asyncio import serve
from hypercorn.config import Config

from pyserve import connection
from pyserve.app import App, StartEngine, banner, check_model, create_app
from pyserve.connection import LoopErrors, raise_descriptor_limit
from pyserve.errors import PyserveError
from pyserve.http.gate import is_open_to_all
from pyserve.http.state import ServerState
from pyserve.log import setup_logging
from pyserve.settings import Settings, load_settings

logger = logging.getLogger("pyserve.main")
CLOSE_TIMEOUT_S = 3.0  # for connections to end once the engine has drained
# Longer than clients' pools keep idle connections, else they write into one that is being closed. A stop does not wait
# for it: hypercorn closes idle connections as soon as it is told to.
KEEP_ALIVE_S = 75.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns the exit code: 0 stopped, 1 cannot serve."""
    settings = load_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    setup_logging(settings.log_level)
    raise_descriptor_limit()
    try:
        listener = _bind(settings)
        with _closed_on_failure(listener):
            _check(settings)  # may build the kernels first; until it is done no connection is taken
            listener.listen(1024)
    except OSError as error:
        return _fail(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}")
    except PyserveError as error:
        return _fail(error.message)
    return asyncio.run(_serve(settings, listener.detach()))


async def _serve(settings: Settings, listener: int) -> int:
    code = await Server(settings, listener).run()
    for number in (signal.SIGTERM, signal.SIGINT):  # it is ending: one more signal must not change the exit code
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    return code


class Server:
    """One run of hypercorn with its signals."""

    def __init__(self, settings: Settings, listener: int, start_engine: StartEngine | None = None) -> None:
        """`listener` is the descriptor of a listening socket, which hypercorn closes."""
        self._settings = settings
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._has_failed = False
        self._app: App = create_app(settings, start_engine, on_failed=self._load_failed)
        self._app.on_loaded = _print_banner
        self._config = _config(listener)

    async def run(self) -> int:
        """The exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        connection.install()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        serving = asyncio.create_task(serve(self._app, self._config, shutdown_trigger=self._wait_for_stop))  # type: ignore[arg-type]
        closing = asyncio.create_task(self._end_late(serving))
        try:
            await serving
        except asyncio.CancelledError:
            logger.warning("some connections did not close in time")
        except Exception as error:
            return _fail(str(error))
        finally:
            closing.cancel()
        return 1 if self._has_failed else 0

    async def _end_late(self, serving: asyncio.Task[None]) -> None:
        """On Python 3.12 and later hypercorn waits without limit for connections that do not close."""
        await self._is_closing.wait()
        await asyncio.wait({serving}, timeout=2 * CLOSE_TIMEOUT_S)
        serving.cancel()

    def _signalled(self, number: int) -> None:
        if not self._stop.is_set():
            timeout_s = self._settings.drain_timeout_s
            logger.info("stopping: running requests have %g s; a second signal stops at once", timeout_s)
            self._stop.set()
            return
        asyncio.get_running_loop().remove_signal_handler(number)
        self._cut.set()

    async def _wait_for_stop(self) -> None:
        """Until hypercorn is to close: a signal came, and the engine has drained or is told not to."""
        await self._stop.wait()
        if not self._has_failed:
            await self._drain_or_cut()
        self._is_closing.set()

    async def _drain_or_cut(self) -> None:
        draining = asyncio.create_task(self._app.drain())
        cutting = asyncio.create_task(self._cut.wait())
        await asyncio.wait({draining, cutting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, cutting):
            task.cancel()
        await asyncio.gather(draining, cutting, return_exceptions=True)
        await self._app.cut()

    def _load_failed(self) -> None:
        self._has_failed = True
        self._stop.set()


def _check(settings: Settings) -> None:
    """Raises PyserveError only: what a file or a full disk is to blame for is not said of the port."""
    try:
        check_model(settings)
    except OSError as error:
        raise PyserveError(str(error)) from error


def _bind(settings: Settings) -> socket.socket:
    """A socket of our own, so that a port where somebody listens is known before the model is read. It does not listen
    yet.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with _closed_on_failure(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.setblocking(False)
    return listener


@contextmanager
def _closed_on_failure(listener: socket.socket) -> Iterator[None]:
    try:
        yield
    except Exception:
        listener.close()
        raise


def _config(listener: int) -> Config:
    """`listener` is a file descriptor, which hypercorn closes."""
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.loglevel = "WARNING"
    config.accesslog = None
    config.graceful_timeout = CLOSE_TIMEOUT_S
    config.h11_max_incomplete_size = 64 * 1024
    config.include_server_header = False
    config.keep_alive_timeout = KEEP_ALIVE_S
    return config


def _print_banner(state: ServerState) -> None:
    host = f"[{state.settings.host}]" if ":" in state.settings.host else state.settings.host
    lines = [*banner(state), f"url    http://{host}:{state.settings.port}"]
    if is_open_to_all(state.settings.cors_origins.split(","), state.settings.api_keys):
        lines.append("note   any web page may call this server: set --api-key or --cors-origins to prevent it")
    print("\n".join(f"  {line}" for line in lines), file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    print(f"pyserve: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the server has its own handler
        sys.exit(130)
