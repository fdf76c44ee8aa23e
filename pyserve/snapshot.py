"""The engine's state as the endpoints show it.

Built when somebody asks, on the event loop, at most once per iteration: the engine's task changes its state only
between two awaits, so what is read here is always the state at the end of an iteration, also while a long step runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pyserve.ledger import Ledger
from pyserve.park import Parking
from pyserve.sequence import Sequence, State
from pyserve.task import Task
from pyserve.types import SlotSnapshot, Snapshot


def take_snapshot(
    ledger: Ledger, parking: Parking, tasks: Mapping[int, Task], *, last_step_at_s: float, is_stuck: bool
) -> Snapshot:
    """`tasks` by sequence id; a slot whose sequence has ended and still waits for its copy shows as idle."""
    slots = [_slot(slot, ledger.sequence_in_slot(slot), parking, tasks) for slot in range(ledger.limits.num_slots)]
    return Snapshot(
        slots=tuple(slots),
        num_waiting=len(ledger.waiting),
        page_size=ledger.limits.page_size,
        num_pages=ledger.limits.num_pages,
        free_pages=ledger.free_pages,
        cached_pages=ledger.cached_pages,
        held_pages=ledger.held_pages,
        transfer_pages=ledger.transfer_pages,
        requests_preempted=sum(slot.is_preempted for slot in slots),
        preempt_ram_bytes=parking.held_bytes,
        preempt_disk_bytes=parking.disk_bytes,
        last_step_at_s=last_step_at_s,
        is_stuck=is_stuck,
        cache_map=ledger.cache_map,
        parked_slots=tuple(each.slot for each in ledger.parked() if each.slot is not None),
    )


def _slot(slot: int, sequence: Sequence | None, parking: Parking, tasks: Mapping[int, Task]) -> SlotSnapshot:
    task = None if sequence is None else tasks.get(sequence.id)
    if sequence is None or task is None:
        return SlotSnapshot(slot)
    request = sequence.request
    computed_prompt = min(sequence.num_computed, sequence.prompt_len)
    return SlotSnapshot(
        id=slot,
        state=_state_name(sequence),
        is_processing=True,
        is_preempted=task.is_preempted,
        n_preempt=task.n_preempt,
        request_id=task.request_id,
        prompt_index=sequence.index,
        prompt_tokens=sequence.prompt_len,
        cached_tokens=sequence.num_cached,
        processed_tokens=max(0, computed_prompt - sequence.num_cached),
        generated_tokens=task.num_sent,
        remaining_tokens=-1 if request.max_tokens is None else request.max_tokens - task.num_sent,
        cells=sequence.num_computed if sequence.pages else 0,
        pages=tuple(sequence.pages),
        tier=None if not task.is_preempted or sequence.tier is None else sequence.tier.value,
        parked_bytes=parking.parked_bytes(sequence),
        parked_ms=(time.monotonic() - task.preempted_at_s) * 1e3 if task.is_preempted else 0.0,
        sampling=request.sampling,
    )


def _state_name(sequence: Sequence) -> str:
    if sequence.state is State.RUNNING:
        return "generating" if sequence.is_generating else "prompt"
    return sequence.state.name.lower()
