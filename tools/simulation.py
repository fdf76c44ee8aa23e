"""A server in simulated time: the real ledger, requests of a trace, and a model that only takes time.

A step takes `step_ms` + `row_ms` per decode row + `token_ms` per prompt token. Copies go one after another on a stream
of their own at `copy_gb_s`, beside the steps; with `is_async` off the next step begins when they have ended. Used by
policy_sim.py and liveness_nightly.py.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

from pyserve.ledger import Ledger, Limits
from pyserve.plan import Plan
from pyserve.policy import Policy
from pyserve.sequence import Sequence, State, Tier
from pyserve.types import SamplingParams, SequenceRequest


@dataclass(frozen=True, slots=True)
class Request:
    arrival_ms: float
    prompt_len: int
    answer_len: int


@dataclass(frozen=True, slots=True)
class Costs:
    """The default is a 4B model on one data-centre GPU: 14 ms a step, 12,000 prompt tokens a second."""

    step_ms: float = 14.0
    row_ms: float = 0.05
    token_ms: float = 0.08
    copy_gb_s: float = 20.0
    token_bytes: int = 147_456  # K and V of one cell, all layers


def conversations(seed: int = 1, rate: float = 5.5) -> Iterator[Request]:
    """Requests of the shape of the Azure conversation trace of 2023: prompts with mean 1,155, median 1,020, p99 4,142
    tokens, answers with 211, 129, 601, arrivals at `rate` a second.
    """
    dice = random.Random(seed)
    now_ms = 0.0
    while True:
        now_ms += dice.expovariate(rate) * 1e3
        yield Request(now_ms, length_at(PROMPTS, dice.random()), length_at(ANSWERS, dice.random()))


# Quantiles of the trace, between which lengths are spread evenly.
PROMPTS = (
    (0.0, 2), (0.1, 200), (0.25, 396), (0.5, 1020), (0.75, 1189), (0.9, 2735), (0.95, 4083), (0.99, 4142), (1.0, 5000)
)  # fmt: skip
ANSWERS = ((0.0, 7), (0.1, 54), (0.25, 85), (0.5, 129), (0.75, 395), (0.9, 424), (0.95, 451), (0.99, 601), (1.0, 800))


def length_at(quantiles: tuple[tuple[float, int], ...], share: float) -> int:
    """Which length so large a share of all does not exceed."""
    for (low, low_len), (high, high_len) in pairwise(quantiles):
        if share <= high:
            return max(1, round(low_len + (high_len - low_len) * (share - low) / (high - low)))
    raise AssertionError("quantiles end at 1")


def read_trace(path: Path) -> Iterator[Request]:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines."""
    first = None
    with path.open() as file:
        if path.suffix == ".jsonl":
            for line in file:
                row = json.loads(line)
                yield Request(float(row["timestamp"]), max(1, row["input_length"]), max(1, row["output_length"]))
            return
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            arrival_ms = (at - first).total_seconds() * 1e3
            yield Request(arrival_ms, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))


@dataclass(slots=True)
class Outcome:
    """What a run was like. Times in milliseconds."""

    makespan_ms: float = 0.0
    completions: list[float] = field(default_factory=list)  # from arrival to end, in order of the requests
    gaps: Counter[int] = field(default_factory=Counter)  # between two tokens of one answer, in tenths of a millisecond
    parks: list[int] = field(default_factory=list)  # per request
    num_copied: int = 0  # tokens, out and back
    num_recomputed: int = 0  # tokens
    num_steps: int = 0
    longest_park_ms: float = 0.0
    held_page_ms: float = 0.0  # pages that somebody held, times how long

    def gap_ms(self, share: float) -> float:
        left = share * self.gaps.total()
        for gap, count in sorted(self.gaps.items()):
            left -= count
            if left <= 0:
                return gap / 10
        return math.nan


class Simulation:
    """Runs `requests`, which are in order of arrival. Raises AssertionError when one is lost or nothing moves."""

    def __init__(
        self,
        limits: Limits,
        costs: Costs,
        policy: Policy | None = None,
        host_pages: int = 1 << 30,
        *,
        check_every: int = 0,
    ) -> None:
        self._limits = limits
        self._costs = costs
        self._ledger = Ledger(limits, policy)
        self._host_pages = host_pages
        self._check_every = check_every  # steps between integrity checks; 0: none
        self._now_ms = 0.0
        self._copy_free_ms = 0.0  # when the copy stream has done all it was given
        self._parks: dict[int, tuple[float, Sequence]] = {}  # in flight: when they land; in order
        self._restores: dict[int, tuple[float, Sequence]] = {}
        self._parked_pages: dict[int, int] = {}  # sequence id -> host pages
        self._last_token_ms: dict[int, float] = {}
        self._arrivals: dict[int, float] = {}
        self._num_idle = 0
        self.outcome = Outcome()

    def run(self, requests: Iterable[Request]) -> Outcome:
        coming = iter(requests)
        following = next(coming, None)
        number = 0
        while following is not None or not self._ledger.is_idle:
            if self._ledger.is_idle and following is not None:
                self._now_ms = max(self._now_ms, following.arrival_ms)
            while following is not None and following.arrival_ms <= self._now_ms:
                self._submit(number, following)
                number += 1
                following = next(coming, None)
            self._iterate()
        self.outcome.makespan_ms = self._now_ms
        assert len(self.outcome.parks) == number, f"{number - len(self.outcome.parks)} requests are lost"
        return self.outcome

    def _submit(self, number: int, request: Request) -> None:
        # No two prompts share a page. A request that could not fit alone is cut as the server's 400 would have it.
        prompt_len = min(request.prompt_len, self._limits.context_len - 1)
        answer_len = min(request.answer_len, self._limits.context_len - prompt_len)
        asked = SequenceRequest((number,) * prompt_len, SamplingParams(), answer_len)
        self._ledger.submit([Sequence(number, asked, number)])
        self._arrivals[number] = request.arrival_ms
        self.outcome.completions.append(math.nan)

    def _iterate(self) -> None:
        plan = self._plan()
        num_plans = 0
        while not self._limits.is_async and (plan.parks or plan.restores):
            num_plans += 1
            assert num_plans < 1000, f"plan follows plan, and none is followed by a step: {self._ledger.live()}"
            self._now_ms = max(self._now_ms, self._copy_free_ms)
            plan = self._plan()
        if plan.rows:
            self._num_idle = 0
            self._step(plan)
        elif self._parks or self._restores:
            landings = [at for at, _ in (*self._parks.values(), *self._restores.values())]
            self._now_ms = max(self._now_ms, min(landings))
        else:
            self._num_idle += 1
            assert self._num_idle < 3, f"nothing moves: {self._ledger.live()}"

    def _plan(self) -> Plan:
        self._land()
        host_pages = self._host_pages - sum(self._parked_pages.values())
        plan = self._ledger.apply(self._ledger.plan(self._now_ms, host_pages), self._now_ms)
        assert not plan.failures, f"ended by pressure: {plan.failures}"
        self._start_copies(plan)
        return plan

    def _land(self) -> None:
        for flights, landed in ((self._parks, self._ledger.park_landed), (self._restores, self._ledger.restore_landed)):
            for id, (at_ms, sequence) in list(flights.items()):
                if at_ms <= self._now_ms:
                    del flights[id]
                    landed(sequence)

    def _start_copies(self, plan: Plan) -> None:
        size = self._limits.page_size
        for park in plan.parks:
            sequence = park.sequence
            if park.tier is Tier.RAM:
                num_pages = -(-sequence.num_computed // size)
                self._parked_pages[sequence.id] = num_pages
                self._parks[sequence.id] = (self._copy(num_pages), sequence)
        for restore in plan.restores:
            sequence = restore.sequence
            if restore.tier is Tier.RAM:
                num_pages = self._parked_pages.pop(sequence.id) - restore.cached_pages
                self._restores[sequence.id] = (self._copy(num_pages), sequence)
            else:
                self.outcome.num_recomputed += len(sequence.tokens) - sequence.num_computed

    def _copy(self, num_pages: int) -> float:
        """When a copy that is posted now has landed."""
        num_tokens = num_pages * self._limits.page_size
        self.outcome.num_copied += num_tokens
        copy_ms = num_tokens * self._costs.token_bytes / (self._costs.copy_gb_s * 1e6)
        self._copy_free_ms = max(self._now_ms, self._copy_free_ms) + copy_ms
        return self._copy_free_ms

    def _step(self, plan: Plan) -> None:
        costs, outcome = self._costs, self.outcome
        rows = plan.rows
        num_tokens = sum(rows.lengths)
        num_rows = sum(rows.samples)
        step_ms = costs.step_ms + costs.row_ms * num_rows + costs.token_ms * (num_tokens - num_rows)
        self._now_ms += step_ms
        outcome.num_steps += 1
        outcome.held_page_ms += step_ms * self._ledger.held_pages
        self._ledger.step_done(rows, [0] * num_rows)
        now_ms, last = self._now_ms, self._last_token_ms
        gaps: Counter[float] = Counter()  # most are one step
        for sequence, samples in zip(rows.sequences, rows.samples, strict=True):
            if samples:
                if sequence.id in last:
                    gaps[now_ms - last[sequence.id]] += 1
                last[sequence.id] = now_ms
                if len(sequence.tokens) - sequence.prompt_len >= (sequence.request.max_tokens or 0):
                    self._finish(sequence)
        for gap, count in gaps.items():
            outcome.gaps[round(10 * gap)] += count
        if self._check_every and outcome.num_steps % self._check_every == 0:
            self._ledger.check_integrity()

    def _finish(self, sequence: Sequence) -> None:
        outcome = self.outcome
        assert self._ledger.finish(sequence, self._now_ms) and sequence.state is State.FINISHED
        outcome.completions[sequence.id] = self._now_ms - self._arrivals.pop(sequence.id)
        outcome.parks.append(sequence.num_parks)
        outcome.longest_park_ms = max(outcome.longest_park_ms, sequence.preempted_ms)
        del self._last_token_ms[sequence.id]


def take(requests: Iterable[Request], count: int) -> list[Request]:
    return list(islice(requests, count))
