"""Errors as clients see them: one JSON object, the same in a body and inside a stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pyserve.errors import NotFound, PyserveError, Unavailable

logger = logging.getLogger("pyserve.http")
Handler = Callable[[Request], Awaitable[Response]]


def as_pyserve_error(error: Exception) -> PyserveError:
    """The error itself, or, for a fault of our own, one that shows no internals. The fault goes to the log."""
    if isinstance(error, PyserveError):
        return error
    logger.error("internal error", exc_info=error)
    return PyserveError(f"Internal error ({type(error).__name__}); the server's log has the details")


def error_object(error: PyserveError) -> dict[str, Any]:
    """The `{"error": ...}` object."""
    body = {"code": error.status, "message": error.message, "type": error.type, "param": error.param}
    return {"error": body | error.extra()}


def error_response(error: PyserveError, **members: Any) -> Response:
    """The error as an HTTP answer; `members` are added beside `error`."""
    headers = {}
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in (500, 501):
        headers["x-should-retry"] = "false"  # OpenAI's clients send a 5xx again otherwise
    return Response(orjson.dumps(error_object(error) | members), error.status, headers, "application/json")


def guarded(handler: Handler) -> Handler:
    """The handler with every error turned into an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_response(as_pyserve_error(error))

    return answer


async def unknown_path(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, which are one case to clients."""
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return error_response(NotFound("File Not Found"))
    return error_response(PyserveError(error.detail))
