"""What hypercorn lacks for clients that come and go: connections that end with their client, and enough descriptors.

hypercorn keeps an idle connection for the keep-alive time even when its client has closed it, which port scans and
health checks of load balancers do all day; and asyncio prints a traceback for each connection that it cannot accept,
thousands a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from contextlib import suppress
from typing import Any

from hypercorn.asyncio import run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Event, Updated

logger = logging.getLogger("pyserve.main")
FEW_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
TELL_INTERVAL_S = 10.0


class Connection(TCPServer):
    """Closes as soon as its client has and nothing is being answered, not when its idle time is over."""

    _has_client = True

    async def _read_data(self) -> None:
        await super()._read_data()
        self._has_client = False
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if self._has_client or not isinstance(event, Updated):  # idle from now on: nobody is there to wait for
            await super().protocol_send(event)


def install() -> None:
    """hypercorn's servers in this process have these connections. hypercorn has no setting for it."""
    assert hasattr(run, "TCPServer"), "this version of hypercorn makes its connections elsewhere"
    run.TCPServer = Connection


def raise_descriptor_limit() -> None:
    """As many open files as the system lets this process have: a stream holds one for as long as it runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS names no limit and refuses to have none: what there is has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class LoopErrors:
    """The event loop's exception handler."""

    def __init__(self) -> None:
        self._told_s = -TELL_INTERVAL_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # a connection that hypercorn cancels when it closes
        if not isinstance(error, OSError) or error.errno not in FEW_DESCRIPTORS:
            loop.default_exception_handler(context)
            return
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_INTERVAL_S:
            self._told_s = now_s
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning("connections wait to be accepted: all %d file descriptors are in use (ulimit -n)", limit)
