"""No step that runs, or waits behind one that does, touches a page in transfer (R36): seen from both sides, for every
copy as it is posted and every step as it is started, in random workloads on pools that are too small.

A step writes the pages of its rows' tokens, and reads all pages before those, of sequences that have ended meanwhile as
well. The bytes alone would not tell: a step is rarely at its last page while a copy is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pyserve.engine import Engine
from pyserve.errors import Unavailable
from pyserve.models.load import Model
from pyserve.types import SequenceRequest
from tests.engine.test_look_ahead import model, random_request, seen
from tests.engine.workload import Run, assert_clean, ignore_speed, request, run

__all__ = ["model"]

NUM_WORKLOADS = 30


def pages_of(combs: torch.Tensor) -> set[int]:
    """Those in a comb table int32 [m, 5]: start, length of a run, stride, number of runs, offset."""
    return {
        start + run * stride + page
        for start, length, stride, count, _ in combs.tolist()
        for run in range(count)
        for page in range(length)
    }


@dataclass
class Watch:
    """What runs and what is being copied, at any moment."""

    page_size: int
    steps: list[tuple[Any, set[int], set[int]]] = field(default_factory=list)  # with pages written, and those read
    copies: list[tuple[Any, bool, set[int]]] = field(default_factory=list)  # event, whether out, pages
    num_copies: int = 0
    num_beside: int = 0  # that were posted while a step ran
    faults: list[str] = field(default_factory=list)
    also: Callable[[Engine], None] = ignore_speed  # what else the engine is prepared with

    def set(self, engine: Engine) -> None:
        ignore_speed(engine)
        self.also(engine)
        runner: Any = engine._runner
        stream: Any = engine._parking.tiers.stream
        start, collect, run_here, copy_pages = runner.start, runner.collect, runner.run, stream.copy_pages

        def started(step: Any) -> None:
            self.begin(step)
            start(step)

        def collected(step: Any) -> Any:
            try:
                return collect(step)
            finally:
                self.end(step)

        def ran(step: Any) -> Any:
            self.begin(step)
            try:
                return run_here(step)
            finally:
                self.end(step)

        def copied(pool: torch.Tensor, host: torch.Tensor, combs: torch.Tensor, to_host: bool, **options: Any) -> Any:
            self.posted(to_host, pages_of(combs))
            event = copy_pages(pool, host, combs, to_host, **options)
            self.copies.append((event, to_host, pages_of(combs)))
            return event

        runner.start, runner.collect, runner.run, stream.copy_pages = started, collected, ran, copied

    def begin(self, step: Any) -> None:
        written: set[int] = set()
        read: set[int] = set()
        for sequence, first, length, _ in step.rows.columns():
            last = (first + length - 1) // self.page_size
            written.update(sequence.pages[first // self.page_size : last + 1])
            read.update(sequence.pages[: last + 1])
        self.copies = [each for each in self.copies if not is_over(each[0])]
        for _, is_out, pages in self.copies:
            self.check(is_out, pages, written, read, "a step starts")
        self.steps.append((step, written, read))

    def end(self, step: Any) -> None:
        self.steps = [each for each in self.steps if each[0] is not step]

    def posted(self, is_out: bool, pages: set[int]) -> None:
        self.num_copies += 1
        self.num_beside += bool(self.steps)
        for _, written, read in self.steps:
            self.check(is_out, pages, written, read, "a copy is posted")

    def check(self, is_out: bool, pages: set[int], written: set[int], read: Iterable[int], when: str) -> None:
        shared = pages & written if is_out else pages & written.union(read)
        if shared:
            self.faults.append(f"{when}: {'out' if is_out else 'back'}, pages {sorted(shared)}")


def is_over(event: Any) -> bool:
    """Failed copies are over, too."""
    try:
        return bool(event.query())
    except RuntimeError:
        return True


def sometimes_scored(wanted: SequenceRequest, source: random.Random) -> SequenceRequest:
    """With log-probabilities now and then: its steps take another way."""
    num_logprobs = source.choice([None, None, None, None, 0, 3])
    return replace(wanted, sampling=replace(wanted.sampling, num_logprobs=num_logprobs))


def workload(model: Model, source: random.Random) -> tuple[Run, Watch, list[Any]]:
    page_size = source.choice([1, 4, 16])
    requests = [sometimes_scored(random_request(source), source) for _ in range(source.randrange(2, 9))]
    watch = Watch(page_size)
    result = run(
        model,
        [[each] for each in requests],
        ctx_size=source.randrange(160, 500),
        parallel=source.randrange(2, 7),
        page_size=page_size,
        batch_size=source.choice([16, 512]),
        preempt_every=source.choice([0, 5, 9]),
        preempt_planner=source.choice([True, True, False]),
        prepare=watch.set,
    )
    return result, watch, requests


def test_no_step_touches_a_page_in_transfer(model: Model) -> None:
    source = random.Random(8)
    num_copies = num_beside = 0
    for _ in range(NUM_WORKLOADS):
        result, watch, requests = workload(model, source)
        assert not watch.faults
        assert_clean(result)
        num_copies += watch.num_copies
        num_beside += watch.num_beside
        wanted = [run(model, [[each]], ctx_size=512, parallel=1).outcomes[0] for each in requests]
        assert [seen(outcome) for outcome in result.outcomes] == [seen(outcome) for outcome in wanted]
        assert [outcome.logprobs for outcome in result.outcomes] == [outcome.logprobs for outcome in wanted]
    assert num_copies > 200
    assert num_beside > 50


def test_what_ends_while_others_are_parked_leaves_its_pages_to_its_step(model: Model) -> None:
    """Its pages are free, and the step that runs still writes to one of them: nobody may come back into that."""
    source = random.Random(9)
    num_ended = 0

    def end_some(engine: Engine) -> None:
        beside: Any = engine._beside
        park = beside.park

        def parked(begun: Any) -> Any:
            nonlocal num_ended
            moved = park(begun)
            running = [each for each in begun.step.rows.sequences if each.id in engine._tasks]
            if moved and running and source.random() < 0.7:
                engine._end(engine._tasks[source.choice(running).id], Unavailable("it is ended here"))
                num_ended += 1
            return moved

        beside.park = parked

    for _ in range(NUM_WORKLOADS):
        watch = Watch(page_size=1, also=end_some)
        requests = [request(source.randrange(1000), source.randrange(5, 40), 40) for _ in range(12)]
        result = run(
            model, [[each] for each in requests], ctx_size=200, parallel=6, page_size=1, preempt_every=2,
            prepare=watch.set,
        )  # fmt: skip
        assert not watch.faults
        assert_clean(result)
    assert num_ended > 10
