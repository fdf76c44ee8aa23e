"""From settings to a running engine: load the model, size the pool, start the task."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyserve import ops
from pyserve.disk_tier import DiskTier
from pyserve.engine import Engine
from pyserve.errors import SettingsError
from pyserve.handle import EngineHandle
from pyserve.kv_store import KvStore, check_memory, page_bytes, resolve_kv_type
from pyserve.ledger import Ledger
from pyserve.models.load import Model, load
from pyserve.models.spec import ModelSpec
from pyserve.ops import Device, PoolShape, open_device
from pyserve.park import Parking
from pyserve.plan import Limits
from pyserve.runner import Runner
from pyserve.settings import Settings
from pyserve.text.chat import ChatTemplate
from pyserve.text.tokenizer import Tokenizer
from pyserve.types import EngineInfo

# A compute thread that comes back from a step waits at most this long for the interpreter; the default of 5 ms is a
# whole step.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers: the engine that runs it and what turns text into tokens and back."""

    engine: EngineHandle
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    spec: ModelSpec
    path: Path


async def start_engine(settings: Settings, model_path: Path, on_progress: Callable[[str, float], None]) -> ServedModel:
    """Load the model off the event loop and start the engine.

    Raises ModelFileError or SettingsError, one line each.
    """
    num_threads = settings.threads or default_threads()
    pool_tokens = math.ceil(settings.ctx_size / settings.page_size) * settings.page_size
    device = await asyncio.to_thread(open_device, settings.device)
    try:
        model = await asyncio.to_thread(
            load,
            model_path,
            max_tokens=settings.batch_size + settings.parallel,
            max_samples=settings.batch_size + settings.parallel,
            max_positions=pool_tokens,
            num_threads=num_threads,
            on_progress=on_progress,
            device=device,
            on_spec=lambda spec: _expect_pool(spec, settings, device),
        )
    except ValueError as error:
        reason = str(error).split("\n", 1)[0]  # torch adds a trace of its own calls
        raise SettingsError(f"--device {device.name} cannot run this model: {reason}") from error
    engine = EngineHandle(await asyncio.to_thread(build_engine, model, settings, num_threads))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # a vocabulary is 100,000 objects that stay; walking them again and again would stall the loop
    await engine.start()
    return ServedModel(engine, model.tokenizer, _chat_template(model), model.spec, model_path)


def _expect_pool(spec: ModelSpec, settings: Settings, device: Device) -> None:
    """Before any weight is packed. Raises SettingsError for a pool that cannot be."""
    size, kv_type = settings.page_size, resolve_kv_type(settings.kv_type, spec.head_dim, device)
    num_bytes = page_bytes(spec.num_layers, spec.num_kv_heads, size, spec.head_dim, kv_type)
    num_pages = math.ceil(settings.ctx_size / size)
    check_memory(device, num_pages, size, num_bytes)
    device.expect(PoolShape(num_pages, size, num_bytes, settings.parallel))


def build_engine(model: Model, settings: Settings, num_threads: int) -> Engine:
    """The engine of a loaded model, not started. The pool is rounded up to whole pages. Takes its time on a GPU."""
    spec, page_size = model.spec, settings.page_size
    num_pages = math.ceil(settings.ctx_size / page_size)
    kv = KvStore(
        num_pages=num_pages,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=page_size,
        head_dim=spec.head_dim,
        kv_type=resolve_kv_type(settings.kv_type, spec.head_dim, model.device),
        device=model.device,
    )
    limits = Limits(
        num_pages=num_pages,
        page_size=page_size,
        num_slots=settings.parallel,
        batch_tokens=settings.batch_size,
        is_parking_on=settings.preempt_ram_mib > 0,
        is_planner_on=settings.preempt_planner,
        is_async=settings.preempt_async,
        preempt_every=settings.preempt_every,
        max_queue=settings.max_queue,
    )
    budget_bytes = settings.preempt_ram_mib << 20
    parking = _parking(kv, settings)
    is_pinned = parking.can_pin()
    info = EngineInfo(
        num_slots=settings.parallel,
        page_size=page_size,
        num_pages=num_pages,
        pool_tokens=num_pages * page_size,
        context_len=min(num_pages * page_size, spec.context_len),
        park_budget_bytes=budget_bytes,
        park_budget_tokens=budget_bytes // kv.page_bytes * page_size,
        page_bytes=kv.page_bytes,
        is_async=settings.preempt_async,
        is_pinned=is_pinned,
        kv_type=kv.kv_type,
        num_threads=num_threads,
        isa=ops.isa(),
        max_queue=settings.max_queue,
        tiers=_tiers(settings),
        copy_tuning=parking.tiers.stream.tuning,
    )
    runner = Runner(model.program, kv, num_slots=settings.parallel, pages_per_sequence=num_pages)
    return Engine(info, Ledger(limits), runner, parking)


def _parking(kv: KvStore, settings: Settings) -> Parking:
    """The tiers. Raises SettingsError when the directory of the disk tier cannot be used."""
    stream = kv.device.copy_stream()
    stream.calibrate(kv.tensor)
    disk = None
    if "disk" in _tiers(settings):
        limit_bytes = settings.preempt_disk_limit_mib << 20
        disk = DiskTier(Path(str(settings.preempt_disk)), limit_bytes=limit_bytes, pool=kv.tensor, stream=stream)
    budget_bytes = settings.preempt_ram_mib << 20
    return Parking(kv, budget_bytes=budget_bytes, stream=stream, disk=disk, verify=settings.verify_parks)


def _tiers(settings: Settings) -> tuple[str, ...]:
    """Where parked state may be, in order of preference; nothing where parking is off."""
    if not settings.preempt_ram_mib:
        return ()
    has_disk = settings.preempt_disk is not None and settings.preempt_disk_limit_mib > 0
    return ("ram", "disk", "recompute") if has_disk else ("ram", "recompute")


def _chat_template(model: Model) -> ChatTemplate:
    tokenizer = model.tokenizer
    bos, eos = (
        None if token is None else tokenizer.token_text(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return ChatTemplate(model.chat_template, bos=bos, eos=eos)


def default_threads() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))
