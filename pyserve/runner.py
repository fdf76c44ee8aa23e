"""The rows of a plan -> tensors -> model -> sampler -> token ids.

`prepare` runs on the event loop and reads the sequences; `run` runs in the compute thread and reads only what
`prepare` made, plus token lists that nobody changes before the step has been awaited.

A step of plain rows may be followed: `prepare_next` makes the decode step behind it while it runs, its tokens still
unknown, and the program goes from the one to the other without waiting for the event loop. In the steady state the
sequences are those of the step that runs, and so is all that is not counted on: `repeat` makes such a step from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from pyserve.kv_store import KvStore
from pyserve.ops import BROKEN_ROW, PageRow, Program, StepBatch, page_row
from pyserve.plan import Row, Rows
from pyserve.pool import Part
from pyserve.sampler import SampleRequest, has_broken_row, sample, token_logprobs
from pyserve.sequence import Sequence
from pyserve.slot_sampling import Sampling, SlotSampling
from pyserve.types import TokenLogprobs


@dataclass(slots=True)
class Step:
    """One step, ready to run. The logits of sample i are row `sample_at[i]` of them. Not changed once it is made: the
    program reads its tensors, and the step behind it may share them.
    """

    rows: Rows
    batch: StepBatch
    sample_at: list[int]
    sampling: Sampling
    scored: list[tuple[Row, int]] = field(default_factory=list)  # rows whose prompt is scored, their first logits row
    sources: torch.Tensor | None = None  # int32 [T]: the sample rows of the step before that pick its tokens, or -1

    @property
    def ids(self) -> list[int]:
        """The sequences of its samples."""
        return [sequence.id for sequence, _, _, samples in self.rows.columns() if samples]

    @property
    def is_plain(self) -> bool:
        """Whether the program can sample it by itself: nothing is scored, and nobody wants log-probabilities."""
        return not self.scored and self.sampling.is_plain


@dataclass(slots=True)
class StepResult:
    """What a step gave: the token of each of its samples, in order, and by sequence id what else was asked for. The ids
    of sequences whose logits were none to go on with are `broken`; BROKEN_ROW may stand for their tokens.
    """

    picked: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # of those tokens
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return len(self.picked) - (self.picked.count(BROKEN_ROW) if self.broken else 0)


class _Slots:
    """What stays the same from step to step: every slot's row of the page table, and how it samples."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.table = np.zeros((num_slots, width), dtype=np.int32)
        self.tensor = torch.from_numpy(self.table)  # int32 [slots, width], the same memory
        self.sampling = SlotSampling(num_slots)
        self._tokens: list[list[int] | None] = [None] * num_slots  # whose sampling that is
        self._pages: list[list[int] | None] = [None] * num_slots
        self._num_written = [0] * num_slots

    def update(self, sequences: list[Sequence], slots: list[int]) -> None:
        """Bring the slots of these sequences up to date. A park or another sequence brings other lists; a list only
        grows.
        """
        known, num_written = self._pages, self._num_written
        for sequence, slot in zip(sequences, slots, strict=True):
            pages = sequence.pages
            if known[slot] is not pages or num_written[slot] != len(pages):
                self.update_one(sequence, slot)

    def update_one(self, sequence: Sequence, slot: int) -> None:
        self._update_pages(sequence.pages, slot)
        if self._tokens[slot] is not sequence.tokens:
            self._tokens[slot] = sequence.tokens
            self.sampling.set(slot, SampleRequest(sequence.request.sampling, sequence.tokens, sequence.prompt_len))

    def pages_of(self, sequence: Sequence, parts: Iterable[Part] = ()) -> PageRow:
        """A copy of its row, up to date."""
        assert sequence.slot is not None
        self._update_pages(sequence.pages, sequence.slot, parts)
        return self.table[sequence.slot, : len(sequence.pages)].copy()

    def _update_pages(self, pages: list[int], slot: int, parts: Iterable[Part] = ()) -> None:
        if self._pages[slot] is not pages:
            self._pages[slot] = pages
            self._num_written[slot] = _write_parts(self.table[slot], parts)
        num_written = self._num_written[slot]
        if len(pages) == num_written + 1:  # as ever when it has grown
            self.table[slot, num_written] = pages[-1]
        elif len(pages) > num_written:
            self.table[slot, num_written : len(pages)] = page_row(pages[num_written:])
        self._num_written[slot] = len(pages)


def _write_parts(row: PageRow, parts: Iterable[Part]) -> int:
    """Returns how many pages there are."""
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        row[start:end] = np.arange(part.start, part.stop) if isinstance(part, range) else page_row(part)
    return end


class Runner:
    """Runs steps of one model over one pool."""

    def __init__(self, program: Program, kv: KvStore, *, num_slots: int, pages_per_sequence: int) -> None:
        self._program = program
        self._kv = kv
        self._slots = _Slots(num_slots, pages_per_sequence)
        self._places = torch.arange(num_slots, dtype=torch.int32)

    def prepare(self, rows: Rows) -> Step:
        """The tensors of one step. Every row's pages are allocated by now."""
        slots = self._slots_of(rows)
        tokens: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        sample_rows: list[int] = []
        sampling_slots: list[int] = []
        lens: list[int] = []  # tokens that each has when it samples
        sample_at: list[int] = []
        scored: list[tuple[Row, int]] = []
        for (sequence, start, length, samples), slot in zip(rows.columns(), slots, strict=True):
            first = len(tokens)
            if length == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                token_slots.append(slot)
            else:
                tokens += sequence.tokens[start : start + length]
                positions += range(start, start + length)
                token_slots += [slot] * length
            if sequence.request.prompt_logprobs is not None and start < sequence.prompt_len - 1:
                scored.append((Row(sequence, start, length, samples), len(sample_rows)))
                sample_rows += range(first, len(tokens))
            elif samples:
                sample_rows.append(len(tokens) - 1)
            if samples:
                sample_at.append(len(sample_rows) - 1)
                sampling_slots.append(slot)
                lens.append(start + length)
        batch = StepBatch(
            tokens=_int32(tokens),
            positions=_int32(positions),
            sequences=_int32(token_slots),
            page_table=self._slots.tensor,
            sample_rows=_int32(sample_rows),
        )
        how = self._slots.sampling.take(sampling_slots, lens, is_scored=bool(scored))
        return Step(rows, batch, sample_at, how, scored)

    def _slots_of(self, rows: Rows) -> list[int]:
        slots: list[int] = [each.slot for each in rows.sequences]  # type: ignore[misc]  # whoever runs has one
        self._slots.update(rows.sequences, slots)
        return slots

    def pages_of(self, sequence: Sequence, parts: Iterable[Part] = ()) -> PageRow:
        """int32 [pages]: the pages of a sequence that is in a slot, in its order, for a copy that may outlast its stay
        there. Costs little if its steps have used them. Others are read one by one, for the steps to come as well; or
        from `parts`, which are its leading pages, or all of them, once more.
        """
        return self._slots.pages_of(sequence, parts)

    @property
    def can_follow(self) -> bool:
        """Whether a step can be started behind another that runs."""
        return self._program.can_follow

    def prepare_next(self, rows: Rows, sources: list[int]) -> Step:
        """The decode step behind a plain step that runs. Row i computes what that step picks for its sample row
        `sources[i]`, or, where that is -1, the token that its sequence has; its page is allocated by now.
        """
        slots, num_rows = self._slots_of(rows), len(rows)
        positions = np.array(rows.starts, dtype=np.int32)
        batch = StepBatch(
            tokens=self._known_tokens(rows, sources),
            positions=torch.from_numpy(positions),
            sequences=_int32(slots),
            page_table=self._slots.tensor,
            sample_rows=self._places[:num_rows],
        )
        sampling = self._slots.sampling.take(slots, positions + 1)
        return Step(rows, batch, [*range(num_rows)], sampling, sources=_int32(sources))

    def repeat(self, step: Step) -> Step:
        """The decode step of the same sequences behind `step`, a plain decode step that runs: what `prepare_next` makes
        of all its rows in their order. Since it was prepared all have stayed in their slots and kept their pages.

        So slots and ways of sampling are as they were, and only a row that enters a page has a new entry in the table.
        """
        rows, before = step.rows.behind(), step.batch
        positions = before.positions.numpy() + 1
        for row in (positions % self._kv.page_size == 0).nonzero()[0].tolist():
            sequence = rows.sequences[row]
            assert sequence.slot is not None
            self._slots.update_one(sequence, sequence.slot)
        places = before.sample_rows  # 0, 1, 2 and so on: each row samples
        batch = StepBatch(places, torch.from_numpy(positions), before.sequences, before.page_table, places)
        return Step(rows, batch, step.sample_at, step.sampling.next(), sources=places)

    def _known_tokens(self, rows: Rows, sources: list[int]) -> torch.Tensor:
        """Those of the rows without a source; any will do for the others."""
        if -1 not in sources:
            return self._places[: len(rows)]
        columns = zip(rows.sequences, rows.starts, sources, strict=True)
        return _int32([sequence.tokens[start] if source < 0 else 0 for sequence, start, source in columns])

    def fileno(self) -> int:
        """Readable when a step that `start` began is done."""
        return self._program.fileno()

    def num_done(self) -> int:
        """How many started steps were done since the last call, when `fileno()` is readable."""
        return self._program.num_done()

    def start(self, step: Step) -> None:
        """Begin a plain step in a thread of the program's; `collect` it once it is done."""
        sampling = step.sampling
        vocab_size = self._program.vocab_size
        self._program.start(
            step.batch, self._kv.tensor, sampling.real, sampling.whole, sampling.bans(vocab_size), step.sources,
            sampling.weighing(vocab_size, follows=step.sources is not None),
        )  # fmt: skip

    def collect(self, step: Step) -> StepResult:
        """The result of the step that was started first. Raises RuntimeError or ValueError when it failed."""
        picked: list[int] = self._program.collect().tolist()
        result = StepResult(picked)
        if BROKEN_ROW in picked:
            result.broken = {id for id, token in zip(step.ids, picked, strict=True) if token == BROKEN_ROW}
        return result

    def run(self, step: Step) -> StepResult:
        """Run any prepared step, log-probabilities included, in the calling thread.

        Raises RuntimeError or ValueError when it fails; the pool's other pages are as before.
        """
        assert step.sources is None, "its tokens are not known"
        logits = self._program.run(step.batch, self._kv.tensor)  # [samples, vocab]
        broken = {row.sequence.id for row, first in step.scored if has_broken_row(logits[first : first + row.length])}
        scored = [(row, first) for row, first in step.scored if row.sequence.id not in broken]
        prompt_logprobs = {row.sequence.id: _score(logits, row, first) for row, first in scored}
        if not step.sample_at:
            return StepResult([], {}, prompt_logprobs, broken)
        wanted = logits if len(step.sample_at) == logits.shape[0] else logits[torch.tensor(step.sample_at)]
        sampled = sample(wanted, step.sampling.requests, self._program.sample)
        logprobs = {id: each.logprobs for id, each in zip(step.ids, sampled, strict=True) if each.logprobs is not None}
        broken |= {id for id, each in zip(step.ids, sampled, strict=True) if each.token == BROKEN_ROW}
        return StepResult([each.token for each in sampled], logprobs, prompt_logprobs, broken)


def _score(logits: torch.Tensor, row: Row, first: int) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens that follow the row's positions."""
    sequence = row.sequence
    num_top = sequence.request.prompt_logprobs or 0
    following = sequence.tokens[row.start + 1 : min(row.start + row.length, sequence.prompt_len - 1) + 1]
    return [token_logprobs(logits[first + i], token, num_top) for i, token in enumerate(following)]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
