"""GET /pool: who holds which page, for the page's live picture. Read from the snapshot, like `/slots` (R34a).

Pages are told as runs, `[first page, number of pages]`, in the pool's order: a chat's pages mostly lie side by side,
and a pool may have hundreds of thousands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pyserve.http import shapes
from pyserve.http.state import ServerState
from pyserve.types import Counters, SlotSnapshot, Snapshot

CACHED_RUN = re.compile(rb"[^\0]+")


async def pool(request: Request) -> Response:
    """GET /pool: pages by holder, slots, the parked in the order of their return, and totals to make rates of."""
    state: ServerState = request.app.state.server
    engine = state.served.engine
    return shapes.json_response(pool_object(engine.snapshot, engine.counters))


def pool_object(snapshot: Snapshot, counters: Counters) -> dict[str, Any]:
    """The answer. `cached_runs` are the pages that only the prompt cache holds; what is in no run is free."""
    slots = [_slot(slot) for slot in snapshot.slots]
    return {
        "num_pages": snapshot.num_pages,
        "page_size": snapshot.page_size,
        "free": snapshot.free_pages,
        "cached": snapshot.cached_pages,
        "transfer": snapshot.transfer_pages,
        "held": snapshot.held_pages,
        "cached_runs": _cached_runs(snapshot.cache_map, (run for slot in slots for run in slot["pages"])),
        "slots": slots,
        "parked": list(snapshot.parked_slots),
        "waiting": snapshot.num_waiting,
        "preempt_ram_bytes": snapshot.preempt_ram_bytes,
        "preempt_disk_bytes": snapshot.preempt_disk_bytes,
        "counters": {
            "generated_tokens": counters.generated_tokens,
            "prompt_tokens": counters.prompt_tokens,
            "preempts": counters.preempts,
            "resumes": counters.resumes,
        },
    }


def _slot(slot: SlotSnapshot) -> dict[str, Any]:
    return {
        "id": slot.id,
        "state": slot.state,
        "is_preempted": slot.is_preempted,
        "pages": _runs(slot.pages),
        "cells": slot.cells,
        "tier": slot.tier,
        "parked_bytes": slot.parked_bytes,
        "parked_ms": round(slot.parked_ms, 1),
        "n_preempt": slot.n_preempt,
        "request": slot.request_id,
        "prompt_tokens": slot.prompt_tokens,
        "generated_tokens": slot.generated_tokens,
    }


def _runs(pages: tuple[int, ...]) -> list[list[int]]:
    """The runs of these pages, upwards; in numpy, because this is done on the event loop."""
    if not pages:
        return []
    ids = np.sort(np.array(pages, np.int64))
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    counts = np.diff(starts, append=len(ids))
    found: list[list[int]] = np.stack((ids[starts], counts), axis=1).tolist()
    return found


def _cached_runs(cache_map: bytes, held_runs: Iterable[list[int]]) -> list[list[int]]:
    """Runs of the pages that the prompt cache knows, less those that a sequence holds."""
    left = bytearray(cache_map)
    for first, count in held_runs:
        left[first : first + count] = bytes(len(left[first : first + count]))
    return [[found.start(), found.end() - found.start()] for found in CACHED_RUN.finditer(left)]
