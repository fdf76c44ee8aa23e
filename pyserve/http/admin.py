"""Endpoints that show the server: health, metrics, slots, props, models. All read snapshots; none waits (R34a)."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import pyserve
from pyserve import metrics
from pyserve.errors import NotFound, NotSupported, Unavailable
from pyserve.http import shapes
from pyserve.http.errors import error_response
from pyserve.http.state import ServerState
from pyserve.types import SamplingParams, SlotSnapshot


async def health(request: Request) -> Response:
    """GET /health: 200 when requests are answered, else 503 with how far loading is.

    `status` is "ok", or "stuck" when requests wait and the engine's watchdog found that nothing moves.
    """
    state: ServerState = request.app.state.server
    if state.model is None:
        message = state.load_failure or "Loading model"
        progress = {"stage": state.load_stage, "fraction": round(state.load_fraction, 3)}
        return error_response(Unavailable(message, retry_after_s=None if state.load_failure else 2), progress=progress)
    if state.is_draining:
        return error_response(Unavailable("Shutting down"))
    snapshot = state.model.engine.snapshot
    return shapes.json_response(
        {
            "status": "stuck" if snapshot.is_stuck else "ok",
            "last_step_age_ms": round((time.monotonic() - snapshot.last_step_at_s) * 1e3, 1)
            if snapshot.last_step_at_s
            else None,
            "slots_idle": sum(not slot.is_processing for slot in snapshot.slots),
            "slots_processing": sum(slot.is_processing for slot in snapshot.slots),
            "requests_deferred": snapshot.num_waiting,
            "requests_preempted": snapshot.requests_preempted,
        }
    )


async def show_metrics(request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    state: ServerState = request.app.state.server
    engine = state.served.engine
    headers = {"Process-Start-Time-Unix": str(int(state.started_at_s)), "Content-Type": metrics.CONTENT_TYPE}
    return Response(metrics.render(engine.snapshot, engine.counters), headers=headers)


async def slots(request: Request) -> Response:
    """GET /slots. `?fail_on_no_slot=1` answers 503 when none is idle."""
    state: ServerState = request.app.state.server
    engine = state.served.engine
    snapshot = engine.snapshot
    if request.query_params.get("fail_on_no_slot") and all(slot.is_processing for slot in snapshot.slots):
        raise Unavailable("no slot available")
    return shapes.json_response([_slot(slot, engine.limits.context_len) for slot in snapshot.slots])


async def props(request: Request) -> Response:
    """GET /props: what this server is. POST is llama.cpp's way to change it, which is off here."""
    state: ServerState = request.app.state.server
    if request.method == "POST":
        raise NotSupported("This server does not support changing global properties")
    return shapes.json_response(_props(state))


async def models(request: Request) -> Response:
    """GET /v1/models, for OpenAI's clients and, under `models`, Ollama's."""
    state: ServerState = request.app.state.server
    spec = state.served.spec
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": spec.architecture,
        "families": [spec.architecture],
        "parameter_size": _billions(spec.num_parameters),
        "quantization_level": spec.file_type,
    }
    entry = {
        "name": state.alias,
        "model": state.alias,
        "modified_at": "",
        "size": str(spec.size_bytes),
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": details,
    }
    return shapes.json_response({"models": [entry], "object": "list", "data": [_model(state)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; ids may contain slashes."""
    state: ServerState = request.app.state.server
    data = _model(state)
    name = request.path_params["id"]
    if name not in data["aliases"]:
        raise NotFound(f"The model '{name}' does not exist", param="model")
    return shapes.json_response(data)


async def not_supported(request: Request) -> Response:
    """Endpoints of llama.cpp that this server does not have."""
    raise NotSupported(f"This server does not support {request.url.path}")


def _model(state: ServerState) -> dict[str, Any]:
    spec, limits = state.served.spec, state.served.engine.limits
    meta = {
        "n_vocab": spec.vocab_size,
        "n_ctx": limits.context_len,
        "n_ctx_train": spec.context_len,
        "n_embd": spec.hidden_size,
        "n_params": spec.num_parameters,
        "size": spec.size_bytes,
        "ftype": spec.file_type,
    }
    return {
        "id": state.alias,
        "aliases": list(state.aliases),
        "tags": [],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "pyserve",
        "max_model_len": limits.context_len,
        "root": str(state.served.path),
        "parent": None,
        "meta": meta,
    }


def _slot(slot: SlotSnapshot, context_len: int) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": context_len,
        "speculative": False,
        "is_processing": slot.is_processing,
        "state": slot.state,
        "is_preempted": slot.is_preempted,
        "n_preempt": slot.n_preempt,
        "cells": slot.cells,
        "pages": len(slot.pages),
        "parked": {"tier": slot.tier, "bytes": slot.parked_bytes, "ms": round(slot.parked_ms, 1)}
        if slot.is_preempted
        else None,
    }
    if slot.request_id is not None:
        remaining = slot.remaining_tokens
        shown |= {
            "id_task": slot.request_id,
            "prompt_index": slot.prompt_index,
            "n_prompt_tokens": slot.prompt_tokens,
            "n_prompt_tokens_processed": slot.processed_tokens,
            "n_prompt_tokens_cache": slot.cached_tokens,
            "params": shapes.sampling_settings(slot.sampling or SamplingParams()),
            "next_token": [
                {"has_next_token": slot.is_processing, "n_remain": remaining, "n_decoded": slot.generated_tokens}
            ],
        }
    return shown


def _props(state: ServerState) -> dict[str, Any]:
    served = state.served
    limits, tokenizer, spec = served.engine.limits, served.tokenizer, served.spec
    return {
        "default_generation_settings": {
            "params": shapes.sampling_settings(SamplingParams()),
            "n_ctx": limits.context_len,
        },
        "total_slots": limits.num_slots,
        "model_alias": state.alias,
        "model_ftype": spec.file_type,
        "model_path": str(served.path),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": True,
        "chat_template": served.chat_template.source,
        "chat_template_caps": _template_caps(),
        "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
        "build_info": f"pyserve {pyserve.__version__}",
        "is_sleeping": False,
        "cors_proxy_enabled": False,
        "pool": {
            "tokens": limits.pool_tokens,
            "pages": limits.num_pages,
            "page_size": limits.page_size,
            "page_bytes": limits.page_bytes,
            "kv_type": limits.kv_type,
        },
        "parking": {
            "is_on": limits.park_budget_bytes > 0,
            "budget_bytes": limits.park_budget_bytes,
            "budget_tokens": limits.park_budget_tokens,
            "tiers": list(limits.tiers),
            "is_async": limits.is_async,
            "is_pinned": limits.is_pinned,
            "copy_tuning": dict(limits.copy_tuning),
        },
        "num_threads": limits.num_threads,
        "isa": limits.isa,
        "is_exact": True,
    }


def _template_caps() -> dict[str, bool]:
    """What the chat endpoint does with a template today: text and system messages."""
    return {
        "supports_system_role": True,
        "supports_string_content": True,
        "supports_typed_content": False,
        "supports_tools": False,
        "supports_tool_calls": False,
        "supports_parallel_tool_calls": False,
        "supports_object_arguments": False,
        "supports_preserve_reasoning": False,
    }


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
