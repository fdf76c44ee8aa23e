"""An engine that follows a script, behind the same contract as the real one, and a small vocabulary to go with it.

A script says what happens to one sequence: events, and floats for seconds to wait. Without one the fake answers every
prompt with `answer`, one token per word, under the request's own limits.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pyserve.errors import ContextExceeded, Unavailable
from pyserve.generation import Generation
from pyserve.models.spec import ModelSpec, RopeSpec
from pyserve.settings import Settings
from pyserve.text.chat import ChatTemplate
from pyserve.text.pieces import Kind, Pieces, Vocabulary
from pyserve.text.tokenizer import Tokenizer
from pyserve.types import (
    Counters,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    PromptProgress,
    SequenceRequest,
    SequenceStats,
    SlotSnapshot,
    Snapshot,
    Started,
    Token,
    TokenLogprobs,
)

Step = Event | float
Script = Callable[[int, SequenceRequest], Iterable[Step]]

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WORDS = ("Hello", " there", ",", " how", " are", " you", "?", " STOP", " never", " sent", "user", "assistant", "system")
TEXTS = (*(chr(byte) for byte in range(256)), *WORDS, *SPECIALS)
IM_START, IM_END, END_OF_TEXT = (len(TEXTS) - 3, len(TEXTS) - 2, len(TEXTS) - 1)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if not (continue_final_message and loop.last) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def word(text: str) -> int:
    """The token of a word of the vocabulary."""
    return TEXTS.index(text)


class GreedyEncoder:
    """The longest word that fits, else bytes."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        words = sorted((*WORDS, *(SPECIALS if parse_special else ())), key=len, reverse=True)
        tokens: list[int] = []
        while text:
            found = next((one for one in words if text.startswith(one)), None)
            tokens += [word(found)] if found else list(text[0].encode())
            text = text[len(found) if found else 1 :]
        return tokens


def make_tokenizer(*, adds_bos: bool = False) -> Tokenizer:
    kinds = [Kind.BYTE] * 256 + [Kind.NORMAL] * len(WORDS) + [Kind.CONTROL] * len(SPECIALS)
    data = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in (*WORDS, *SPECIALS))]
    vocabulary = Vocabulary(
        pieces=Pieces(TEXTS, kinds, data),
        encoder=GreedyEncoder(),
        bos_id=IM_START,
        eos_id=IM_END,
        eog_ids=frozenset({IM_END, END_OF_TEXT}),
        adds_bos=adds_bos,
        adds_eos=False,
        strips_leading_space=False,
    )
    return Tokenizer(vocabulary)


@cache
def make_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, bos="", eos="<|im_end|>")


def make_spec() -> ModelSpec:
    rope = RopeSpec(base=10000.0, rotary_dim=64, is_interleaved=True)
    return ModelSpec(
        architecture="llama", name="Fake", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=len(TEXTS), context_len=2048, norm_eps=1e-5, rope=rope, windows=(0, 0),
        attention_scale=0.25, activation="silu", biases=frozenset(), is_head_normed=False, is_tied=True,
        num_parameters=135_000_000, file_type="Q4_1", size_bytes=91_000_000,
    )  # fmt: skip


@dataclass(frozen=True)
class FakeLimits:
    num_slots: int = 4
    page_size: int = 16
    num_pages: int = 64
    pool_tokens: int = 1024
    context_len: int = 1024
    page_bytes: int = 4096
    park_budget_bytes: int = 8192 << 20
    park_budget_tokens: int = 100_000
    tiers: tuple[str, ...] = ("ram", "recompute")
    is_async: bool = True
    is_pinned: bool = False
    copy_tuning: Mapping[str, int] = field(default_factory=lambda: {"max_calls": 9})
    kv_type: str = "f16"
    num_threads: int = 2
    isa: str = "avx2"


@dataclass
class FakeEngine:
    """Set `script` to drive a test; look at `submitted`, `cancelled` and `num_open` afterwards."""

    limits: FakeLimits = field(default_factory=FakeLimits)
    counters: Counters = field(default_factory=Counters)
    answer: tuple[str, ...] = ("Hello", " there", ",", " how", " are", " you", "?")
    token_delay_s: float = 0.0
    script: Script | None = None
    max_queue: int = 256
    submitted: list[tuple[str, tuple[SequenceRequest, ...]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)  # ended by a stop string
    num_open: int = 0
    is_draining: bool = False
    is_stuck: bool = False
    _tasks: dict[asyncio.Task[None], tuple[Generation, int]] = field(default_factory=dict)

    @property
    def snapshot(self) -> Snapshot:
        slots = tuple(
            SlotSnapshot(index, "generating", is_processing=True, request_id="task", generated_tokens=1, cells=4)
            if index < self.num_open else SlotSnapshot(index)
            for index in range(self.limits.num_slots)
        )  # fmt: skip
        return Snapshot(
            slots=slots, page_size=16, num_pages=64, free_pages=60, held_pages=4, last_step_at_s=time.monotonic(),
            is_stuck=self.is_stuck,
        )  # fmt: skip

    def submit(self, requests: Sequence[SequenceRequest], request_id: str) -> Generation:
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if self.num_open + len(requests) > self.max_queue:
            raise Unavailable("the queue is full", retry_after_s=1)
        for request in requests:
            if len(request.prompt) >= self.limits.context_len:
                raise ContextExceeded("too long", n_prompt_tokens=len(request.prompt), n_ctx=self.limits.context_len)
        self.submitted.append((request_id, tuple(requests)))
        indices = {}
        generation = Generation(len(requests), lambda index, is_complete: self._cancel(indices[index], is_complete))
        for index, request in enumerate(requests):
            task = asyncio.create_task(self._run(generation, index, request))
            indices[index] = task
            self._tasks[task] = generation, index
            self.num_open += 1
        return generation

    async def start(self) -> None:
        return None

    async def drain(self, deadline_s: float) -> bool:
        self.is_draining = True
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=deadline_s)
        return not self._tasks

    async def stop(self) -> None:
        self.is_draining = True
        for task, (generation, index) in tuple(self._tasks.items()):
            generation.put(Failed(index, Unavailable("the server is shutting down"), SequenceStats()))
            task.cancel()

    def _cancel(self, task: asyncio.Task[None], is_complete: bool) -> None:
        if task in self._tasks:
            (self.completed if is_complete else self.cancelled).append(self._tasks[task][1])
            task.cancel()

    async def _run(self, generation: Generation, index: int, request: SequenceRequest) -> None:
        try:
            for step in (self.script or self._answer)(index, request):
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                else:
                    generation.put(step)
        finally:
            self.num_open -= 1
            self._tasks.pop(asyncio.tasks.current_task(), None)  # type: ignore[arg-type]

    def _answer(self, index: int, request: SequenceRequest) -> Iterator[Step]:
        num_prompt = len(request.prompt)
        yield Started(index, index)
        yield PromptProgress(index, num_prompt, 0, num_prompt, 1.0)
        if request.prompt_logprobs is not None:
            yield PromptLogprobs(index, tuple(scored(token) for token in request.prompt[1:]))
        limit = len(self.answer) if request.max_tokens is None else request.max_tokens
        bans = dict(request.sampling.banned_until)
        for count, text in enumerate(self.answer * (1 + limit // len(self.answer) if IM_END in bans else 1)):
            if count == limit:
                yield Finished(index, FinishReason.LENGTH, stats(request, limit))
                return
            yield self.token_delay_s
            logprobs = None if request.sampling.num_logprobs is None else scored(word(text))
            yield Token(index, word(text), logprobs)
        yield Finished(index, FinishReason.STOP, stats(request, len(self.answer) + 1))


def stats(request: SequenceRequest, generated: int, n_preempt: int = 0) -> SequenceStats:
    return SequenceStats(len(request.prompt), 0, generated, 10.0, 20.0, n_preempt, 5.0 * n_preempt)


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, ((token, -0.5), (65, float("-inf"))))


@dataclass(frozen=True)
class FakeServed:
    """A served model around the fake engine."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    tokenizer: Tokenizer = field(default_factory=make_tokenizer)
    chat_template: ChatTemplate = field(default_factory=make_template)
    spec: ModelSpec = field(default_factory=make_spec)
    path: Path = Path("/models/fake.gguf")


def starter(served: FakeServed) -> Callable[..., object]:
    """A `start_engine` for `create_app`."""

    async def start(settings: Settings, on_progress: Callable[[str, float], None]) -> FakeServed:
        return served

    return start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
