"""What the endpoints know: the engine behind its contract, the model that it serves, and how far loading is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pyserve.errors import Unavailable
from pyserve.generation import Generation
from pyserve.settings import Settings
from pyserve.types import Counters, SequenceRequest, Snapshot

if TYPE_CHECKING:  # torch and tokenizers come with them, and the app must import fast
    from pyserve.models.spec import ModelSpec
    from pyserve.text.chat import ChatTemplate
    from pyserve.text.tokenizer import Tokenizer


class EngineLimits(Protocol):
    """What the engine was started with; tokens unless the name says otherwise."""

    @property
    def num_slots(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def pool_tokens(self) -> int: ...
    @property
    def context_len(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def park_budget_bytes(self) -> int: ...
    @property
    def park_budget_tokens(self) -> int: ...
    @property
    def tiers(self) -> tuple[str, ...]: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def is_pinned(self) -> bool: ...
    @property
    def copy_tuning(self) -> Mapping[str, int]: ...
    @property
    def kv_type(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...


class Engine(Protocol):
    """The engine as its callers see it."""

    @property
    def limits(self) -> EngineLimits: ...
    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def counters(self) -> Counters: ...
    def submit(self, requests: Sequence[SequenceRequest], request_id: str) -> Generation: ...
    async def start(self) -> None: ...
    async def drain(self, deadline_s: float) -> bool: ...
    async def stop(self) -> None: ...


class ServedModel(Protocol):
    """A started engine and what turns text into its tokens and back."""

    @property
    def engine(self) -> Engine: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def path(self) -> Path: ...


@dataclass(slots=True)
class ServerState:
    """The one mutable record of a running server, made by `create_app` and handed to the endpoints."""

    settings: Settings
    model: ServedModel | None = None
    load_stage: str = "starting"
    load_fraction: float = 0.0
    load_failure: str | None = None
    is_draining: bool = False
    started_at_s: float = field(default_factory=time.time)  # Unix time

    @property
    def served(self) -> ServedModel:
        """The model. Raises Unavailable while it loads."""
        if self.model is None:
            raise Unavailable(self.load_failure or "Loading model", retry_after_s=None if self.load_failure else 2)
        return self.model

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names that the model goes by, the first of them in every answer."""
        names = sorted(name.strip() for name in (self.settings.alias or "").split(",") if name.strip())
        return tuple(names) or (self.served.path.name,)

    @property
    def alias(self) -> str:
        return self.aliases[0]
