"""What every request passes first: CORS, API keys, and the answer while the model loads."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyserve.errors import AuthenticationFailed, Unavailable
from pyserve.http import web
from pyserve.http.errors import error_response
from pyserve.http.state import ServerState

HEALTH_PATHS = frozenset({"/health", "/v1/health"})
LOADING_PATHS = HEALTH_PATHS | frozenset(web.FILES)  # answered also while the model loads
PUBLIC_PATHS = LOADING_PATHS | {"/models", "/v1/models"}
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
Header = tuple[bytes, bytes]


class Gate:
    """ASGI middleware. Adds nothing to the cost of a stream but one header at its start."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.settings.api_keys]
        self._origins = frozenset(part.strip() for part in state.settings.cors_origins.split(","))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        cors = self._cors_headers(headers.get("origin"))

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *cors]
            await send(message)

        body = _Body(receive)
        answer = self._answer(scope["method"], _route_path(scope), headers)
        await (answer or self._app)(scope, body.receive, send_with_cors if cors else send)
        await body.read_rest()

    def _answer(self, method: str, path: str, headers: Headers) -> Response | None:
        """The answer that ends it here, or None for a request that may go on."""
        if method == "OPTIONS":
            allowed = {
                "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
                "Access-Control-Allow-Headers": "*",
            }
            return Response(b"", headers=allowed, media_type="text/html")
        if self._keys and path not in PUBLIC_PATHS and not self._is_known(_sent_key(headers)):
            return error_response(AuthenticationFailed("Invalid API Key"))
        state = self._state
        if state.model is None and path not in LOADING_PATHS:
            return error_response(Unavailable(state.load_failure or "Loading model", retry_after_s=2))
        return None

    def _is_known(self, key: bytes) -> bool:
        """Compares with every key, each in constant time, so that the time says nothing about any."""
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0

    def _cors_headers(self, origin: str | None) -> list[Header]:
        if origin is None or not self._is_allowed(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-credentials", b"true"),
            (b"vary", b"Origin"),
        ]

    def _is_allowed(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return "localhost" in self._origins and _host(origin) in LOCAL_HOSTS


class _Body:
    """A request's body, which has to be read also when the answer did not need it.

    hypercorn stops reading a connection whose body nobody takes, and would then not even notice that it was closed.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_over = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_over = not message.get("more_body", False)
        return message

    async def read_rest(self) -> None:
        while not self._is_over:
            await self.receive()


def _route_path(scope: Scope) -> str:
    """The path below the prefix that a proxy or --root-path gives the server."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _sent_key(headers: Headers) -> bytes:
    """`Authorization: Bearer key`, a bare `Authorization: key`, or `X-Api-Key: key` when there is no Authorization."""
    authorization = headers.get("authorization", "").strip()
    key = authorization or headers.get("x-api-key", "").strip()
    scheme, _, rest = key.partition(" ")
    return (rest.strip() if scheme.lower() == "bearer" and rest else key).encode("latin-1")


def is_open_to_all(origins: Iterable[str], api_keys: Iterable[str]) -> bool:
    """Whether any web page may use the server: worth a warning when it starts."""
    return "*" in origins and not tuple(api_keys)
