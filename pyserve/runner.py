"""The rows of a plan -> tensors -> model -> sampler -> token ids.

`prepare` runs on the event loop and reads the sequences; `run` runs in the compute thread and reads only what
`prepare` made, plus token lists that nobody changes before the step has been awaited.

A step of plain rows may be followed: `prepare_next` makes the decode step behind it while it runs, its tokens still
unknown, and the program goes from the one to the other without waiting for the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from pyserve.kv_store import KvStore
from pyserve.ops import Program, StepBatch
from pyserve.plan import Row
from pyserve.sampler import Sampled, SampleRequest, sample, sampling_tables, token_logprobs
from pyserve.sequence import Sequence
from pyserve.types import TokenLogprobs


@dataclass(slots=True)
class Step:
    """One step, ready to run.

    `rows[i]` of those that sample has `requests[i]` and row `sample_at[i]` of the logits.
    """

    rows: tuple[Row, ...]
    batch: StepBatch
    requests: list[SampleRequest]
    sample_at: list[int]
    scored: list[tuple[Row, int]]  # rows whose prompt is scored, with their first logits row
    sources: torch.Tensor | None = None  # int32 [T]: the sample rows of the step before that pick its tokens

    @property
    def is_plain(self) -> bool:
        """Whether the program can sample it by itself: nothing is scored, and no row's logits change but by bans."""
        return not self.scored and all(request.is_plain for request in self.requests)


@dataclass(slots=True)
class StepResult:
    """What a step gave: sequence id -> the token sampled, and the log-probabilities of scored prompts."""

    sampled: dict[int, Sampled]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class _Slots:
    """What stays the same from step to step: every slot's row of the page table and its sampling request."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.table = np.zeros((num_slots, width), dtype=np.int32)
        self.tensor = torch.from_numpy(self.table)  # int32 [slots, width], the same memory
        self.requests: list[SampleRequest | None] = [None] * num_slots
        self._tokens: list[list[int] | None] = [None] * num_slots  # whose request that is
        self._pages: list[list[int] | None] = [None] * num_slots
        self._num_written = [0] * num_slots

    def update(self, slot: int, sequence: Sequence) -> None:
        """Bring one slot up to date. A park or another sequence brings another list; a list only grows."""
        pages = sequence.pages
        if self._pages[slot] is not pages:
            self._pages[slot] = pages
            self._num_written[slot] = 0
        num_written = self._num_written[slot]
        if num_written != len(pages):
            self.table[slot, num_written : len(pages)] = pages[num_written:]
            self._num_written[slot] = len(pages)
        if self._tokens[slot] is not sequence.tokens:
            self._tokens[slot] = sequence.tokens
            self.requests[slot] = SampleRequest(sequence.request.sampling, sequence.tokens, sequence.prompt_len)


class Runner:
    """Runs steps of one model over one pool."""

    def __init__(self, program: Program, kv: KvStore, *, num_slots: int, pages_per_sequence: int) -> None:
        self._program = program
        self._kv = kv
        self._slots = _Slots(num_slots, pages_per_sequence)
        self._places = torch.arange(num_slots, dtype=torch.int32)

    def prepare(self, rows: Items[Row]) -> Step:
        """The tensors of one step. Every row's pages are allocated by now."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sample_rows: list[int] = []
        sample_at: list[int] = []
        requests: list[SampleRequest] = []
        scored: list[tuple[Row, int]] = []
        for row in rows:
            sequence, start, length, samples = row
            slot = sequence.slot
            assert slot is not None
            self._slots.update(slot, sequence)
            first = len(tokens)
            if length == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                slots.append(slot)
            else:
                tokens += sequence.tokens[start : start + length]
                positions += range(start, start + length)
                slots += [slot] * length
            if sequence.request.prompt_logprobs is not None and start < sequence.prompt_len - 1:
                scored.append((row, len(sample_rows)))
                sample_rows += range(first, len(tokens))
            elif samples:
                sample_rows.append(len(tokens) - 1)
            if samples:
                sample_at.append(len(sample_rows) - 1)
                requests.append(self._slots.requests[slot])  # type: ignore[arg-type]  # just brought up to date
        batch = StepBatch(
            tokens=_int32(tokens),
            positions=_int32(positions),
            sequences=_int32(slots),
            page_table=self._slots.tensor,
            sample_rows=_int32(sample_rows),
        )
        return Step(tuple(rows), batch, requests, sample_at, scored)

    @property
    def can_follow(self) -> bool:
        """Whether a step can be started behind another that runs."""
        return self._program.can_follow

    def prepare_next(self, rows: Items[Row], sources: list[int]) -> Step:
        """The decode step behind a plain step that runs. Row i computes what that step picks for its sample row
        `sources[i]`; its page is allocated by now.
        """
        slots: list[int] = []
        requests: list[SampleRequest] = []
        for row in rows:
            slot = row.sequence.slot
            assert slot is not None
            self._slots.update(slot, row.sequence)
            slots.append(slot)
            requests.append(self._slots.requests[slot])  # type: ignore[arg-type]  # just brought up to date
        batch = StepBatch(
            tokens=self._places[: len(rows)],  # any will do
            positions=_int32([row.start for row in rows]),
            sequences=_int32(slots),
            page_table=self._slots.tensor,
            sample_rows=self._places[: len(rows)],
        )
        return Step(tuple(rows), batch, requests, list(range(len(rows))), [], _int32(sources))

    def fileno(self) -> int:
        """Readable when a step that `start` began is done."""
        return self._program.fileno()

    def num_done(self) -> int:
        """How many started steps were done since the last call, when `fileno()` is readable."""
        return self._program.num_done()

    def start(self, step: Step) -> None:
        """Begin a plain step in a thread of the program's; `collect` it once it is done."""
        tables = sampling_tables(step.requests, self._program.vocab_size, num_ahead=step.sources is not None)
        self._program.start(step.batch, self._kv.tensor, *tables, step.sources)

    def collect(self, step: Step) -> StepResult:
        """The result of the step that was started first. Raises RuntimeError or ValueError when it failed."""
        tokens: list[int] = self._program.collect().tolist()
        sampling = (row.sequence.id for row in step.rows if row.samples)
        return StepResult({key: Sampled(token, None) for key, token in zip(sampling, tokens, strict=True)}, {})

    def run(self, step: Step) -> StepResult:
        """Run any prepared step, log-probabilities and penalties included, in the calling thread.

        Raises RuntimeError or ValueError when it fails; the pool's other pages are as before.
        """
        logits = self._program.run(step.batch, self._kv.tensor)  # [samples, vocab]
        prompt_logprobs = {row.sequence.id: _score(logits, row, first) for row, first in step.scored}
        if not step.requests:
            return StepResult({}, prompt_logprobs)
        wanted = logits if len(step.sample_at) == logits.shape[0] else logits[torch.tensor(step.sample_at)]
        sampled = sample(wanted, step.requests, self._program.sample)
        ids = [row.sequence.id for row in step.rows if row.samples]
        return StepResult(dict(zip(ids, sampled, strict=True)), prompt_logprobs)


def _score(logits: torch.Tensor, row: Row, first: int) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens that follow the row's positions."""
    sequence = row.sequence
    num_top = sequence.request.prompt_logprobs or 0
    following = sequence.tokens[row.start + 1 : min(row.start + row.length, sequence.prompt_len - 1) + 1]
    return [token_logprobs(logits[first + i], token, num_top) for i, token in enumerate(following)]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
