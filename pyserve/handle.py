"""What the HTTP side holds of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items

from pyserve.engine import Engine
from pyserve.errors import ContextExceeded, InvalidRequest, Unavailable
from pyserve.generation import Generation
from pyserve.types import Counters, EngineInfo, SequenceRequest, Snapshot


class EngineHandle:
    """What the HTTP side holds of the engine. All methods belong to the engine's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    @property
    def limits(self) -> EngineInfo:
        return self._engine.info

    @property
    def snapshot(self) -> Snapshot:
        return self._engine.snapshot()

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def submit(self, requests: Items[SequenceRequest], request_id: str) -> Generation:
        """Start a request of one or more sequences.

        Raises ContextExceeded or Unavailable, and then nothing was started.
        """
        info = self._engine.info
        if self._engine.is_draining:
            raise Unavailable("the server is shutting down")
        for request in requests:
            is_scored_only = request.max_tokens == 0
            if len(request.prompt) >= info.context_len + is_scored_only:
                what = "is more than" if is_scored_only else "leaves no room for an answer in"
                raise ContextExceeded(
                    f"the prompt has {len(request.prompt)} tokens, which {what} the {info.context_len} that a "
                    "conversation may have: shorten it, or start the server with a larger --ctx-size",
                    n_prompt_tokens=len(request.prompt),
                    n_ctx=info.context_len,
                )
        if len(requests) > info.max_queue + info.num_slots:
            raise InvalidRequest(
                f"{len(requests)} sequences in one request; {info.num_slots} slots and a queue of {info.max_queue} "
                f"(--max-queue) can never take them at once: send fewer prompts",
                param="prompt",
            )
        if self._engine.num_waiting + len(requests) > info.max_queue:
            raise Unavailable(f"the queue of {info.max_queue} requests is full (--max-queue)", retry_after_s=1)
        return self._engine.submit(requests, request_id)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._engine.run(), name="pyserve-engine")

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and wait until the running ones end, at most `deadline_s`. True: all have ended."""
        self._engine.is_draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._engine.is_empty.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End what still runs, wait for every copy, stop the task."""
        self._engine.is_draining = True
        self._engine.stop()
        if self._task is not None:
            await asyncio.shield(self._task)  # it ends by itself, also when whoever waits for it here gives up
            self._task = None
