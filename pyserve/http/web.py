"""The page at `/` (R35): a few static files, open to all, also while the model loads.

They go out with a strict Content-Security-Policy: nothing from another server, and no script or style but those files.
Their paths are relative, so that the page also works behind a proxy that serves it under a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from pyserve.http.errors import Handler

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/index.html": ("index.html", "text/html; charset=utf-8"),
    "/web/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/web/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/web/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/web/pool.js": ("pool.js", "text/javascript; charset=utf-8"),
    "/web/icon.svg": ("icon.svg", "image/svg+xml"),
    "/web/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Cache-Control": "no-cache",  # ask each time, and get a 304: a new version of the server shows its own page
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file and its tag, which changes with the content."""

    data: bytes
    etag: str


@cache
def read_asset(name: str) -> Asset:
    """A file of pyserve/web, read once."""
    data = resources.files("pyserve").joinpath("web", name).read_bytes()
    return Asset(data, f'"{sha256(data).hexdigest()[:16]}"')


def asset(name: str, content_type: str) -> Handler:
    """The handler of one file. A path of a request never reaches the file system."""

    async def answer(request: Request) -> Response:
        found = read_asset(name)
        headers = HEADERS | {"ETag": found.etag}
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(found.data, headers=headers | {"Content-Type": content_type})

    return answer
