"""Errors as clients see them: one JSON object, the same in a body and inside a stream."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from pyserve.errors import MethodNotAllowed, NotFound, PyserveError, Unavailable

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


async def no_route(request: Request, error: Exception) -> Response:
    """Unknown paths, and known ones with a method that they do not take."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound("File Not Found"))
    if error.status_code != 405:
        return error_response(PyserveError(error.detail))
    allowed = ", ".join(_methods(request))
    message = f"The method {request.method} is not allowed here; {request.url.path} takes {allowed}"
    response = error_response(MethodNotAllowed(message))
    response.headers["Allow"] = allowed
    return response


def _methods(request: Request) -> list[str]:
    """The methods that the path takes, by whichever route; every path takes OPTIONS."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods} | {"OPTIONS"})
