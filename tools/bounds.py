"""What no schedule of a whole trace can beat, not even one that knows every arrival and every length in advance.

The bounds know the machine of simulation.py: what a step, a row and a prompt token cost, the pages of the pool and how
many a sequence takes, the slots, the prompt tokens of a step. They give it more than it has: any part of a step can be
worked on at any time, parks and restores cost nothing. optimum.py has the exact optimum, for a few requests, and a test
holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import mean

import numpy as np
import numpy.typing as npt

from pyserve.ledger import Limits
from tools.simulation import Costs, Request

Floats = npt.NDArray[np.float64]


def alone_ms(request: Request, costs: Costs, batch_tokens: int) -> float:
    """From arrival to end with the server to itself."""
    num_steps = math.ceil(request.prompt_len / batch_tokens) + request.answer_len - 1
    return num_steps * costs.step_ms + costs.row_ms * request.answer_len + costs.token_ms * (request.prompt_len - 1)


@dataclass(frozen=True, slots=True)
class Shares:
    """What requests take of the server's time at least: of each step the part of the pool that they fill, or of the
    slots, and what their own tokens cost. The shares in a step add up to no more than the step, so that no schedule
    does more than one millisecond of shares in a millisecond, where each is done evenly from the beginning of its step
    to the end.
    """

    costs: Costs
    limits: Limits
    is_by_slot: bool = False

    def of(self, prompt_len: Floats, num_tokens: Floats) -> Floats:
        """Milliseconds until `num_tokens` of the answer are there. A chunk before the last leaves at most a full chunk
        for each that follows.
        """
        costs = self.costs
        steps = self._slots(prompt_len, num_tokens) if self.is_by_slot else self._pages(prompt_len, num_tokens)
        ms = costs.step_ms * steps + costs.row_ms * num_tokens + costs.token_ms * (prompt_len - 1)
        return np.asarray(np.where(num_tokens > 0, ms, 0.0))

    def _slots(self, prompt_len: Floats, num_tokens: Floats) -> Floats:
        """Steps, each as the share that one slot is of all. No more than that many have a row in one."""
        num_steps = np.ceil(prompt_len / self.limits.batch_tokens) + num_tokens - 1
        return np.asarray(num_steps / self.limits.num_slots)

    def _pages(self, prompt_len: Floats, num_tokens: Floats) -> Floats:
        """Steps, each as the share of the pool that is filled."""
        limits = self.limits
        pages = self._pages_below(prompt_len + num_tokens) - self._pages_below(prompt_len)
        for number in range(1, math.ceil(prompt_len.max() / limits.batch_tokens)):
            pages += np.ceil(np.maximum(0, prompt_len - number * limits.batch_tokens) / limits.page_size)
        return np.asarray(pages / limits.num_pages)

    def _pages_below(self, num_cells: Floats) -> Floats:
        """The sum of the pages of 1, 2, ... `num_cells` - 1 cells."""
        size = self.limits.page_size
        full, rest = np.divmod(num_cells - 1, size)
        return np.asarray(size * full * (full + 1) / 2 + rest * (full + 1))

    def done_by(self, now_ms: float, requests: Floats) -> Floats:
        """The most of each share that can be done by then: what a request gets done alone, since it came. Before its
        first token that is no more than the time since then, for the shares of a step are no more than the step; of
        the step that is running, as much as there is of the shortest.
        """
        costs = self.costs
        arrival_ms, prompt_len, answer_len = requests
        chunks = np.ceil(prompt_len / self.limits.batch_tokens)
        first_ms = chunks * costs.step_ms + costs.token_ms * (prompt_len - 1) + costs.row_ms
        since_ms = np.maximum(0.0, now_ms - arrival_ms)
        tokens = 1 + np.maximum(0.0, since_ms - first_ms) / (costs.step_ms + costs.row_ms)
        whole = np.minimum(np.floor(tokens), answer_len)
        done = self.of(prompt_len, whole)
        following = self.of(prompt_len, np.minimum(whole + 1, answer_len))
        return np.asarray(np.minimum(done + (tokens % 1) * (following - done), since_ms))

    def lag_ms(self, prompt_len: Floats, answer_len: Floats) -> Floats:
        """How long before its end a request's shares are done, on average over them, at least: each is followed by all
        further steps. What comes before the first token is done in no less time than its share takes.
        """
        costs = self.costs
        step_ms = costs.step_ms + costs.row_ms
        whole = self.of(prompt_len, answer_len)
        done = self.of(prompt_len, np.ones_like(prompt_len))
        lag = done * (done / 2 + (answer_len - 1) * step_ms)
        for number in range(2, int(answer_len.max()) + 1):
            tokens = np.minimum(number, answer_len)
            left = np.maximum(0.0, answer_len - number)
            before, done = done, self.of(prompt_len, tokens)
            lag += (done - before) * (left + 0.5) * step_ms
        return np.asarray(lag / whole)


def bound(requests: Sequence[Request], costs: Costs, limits: Limits) -> tuple[float, float]:
    """Makespan and mean completion, in milliseconds.

    Makespan: when somebody comes, the shares that cannot have been done yet are still to do. Completion: nobody is
    faster than alone; and one machine that works off the shares is not slower, where the shortest remaining first is
    optimal. Or the times at which each one's shares are done on average, and the time from there to its end: the mean
    of the former is least on one machine that works off the shortest first, however much of it is left ("Single
    machine scheduling with release dates", SIAM Journal on Discrete Mathematics 15, 2002).
    """
    table = np.array([(each.arrival_ms, each.prompt_len, each.answer_len) for each in requests]).T  # [3, requests]
    alone = np.array([alone_ms(each, costs, limits.batch_tokens) for each in requests])
    makespan, completion = (table[0] + alone).max(), alone.mean()
    for shares in (Shares(costs, limits), Shares(costs, limits, is_by_slot=True)):
        whole = shares.of(table[1], table[2])
        makespan = max(makespan, *(at + (whole - shares.done_by(at, table)).sum() for at in table[0]))
        arrivals, works = table[0].tolist(), whole.tolist()
        by_shares = mean(end for end, _ in one_machine(arrivals, works, is_by_remaining=True))
        done = mean(middle for _, middle in one_machine(arrivals, works, is_by_remaining=False))
        completion = max(completion, by_shares, done + shares.lag_ms(table[1], table[2]).mean())
    return float(makespan), float(completion)


def one_machine(
    arrivals: Sequence[float], works: Sequence[float], *, is_by_remaining: bool
) -> list[tuple[float, float]]:
    """Times from arrival to the end, and to the moment at which each one's work is done on average, on one machine. The
    least work goes first, the least that is left if `is_by_remaining`.
    """
    waiting: list[tuple[float, int]] = []  # what it goes by, number
    left = list(works)
    ends = [0.0] * len(works)
    middles = [0.0] * len(works)
    now = 0.0
    number = 0
    while number < len(works) or waiting:
        if not waiting:
            now = max(now, arrivals[number])
        while number < len(works) and arrivals[number] <= now:
            heappush(waiting, (works[number], number))
            number += 1
        _, first = heappop(waiting)
        until = arrivals[number] if number < len(works) else math.inf
        is_ending = now + left[first] <= until
        work = left[first] if is_ending else until - now
        middles[first] += work / works[first] * (now + work / 2 - arrivals[first])
        now = now + work if is_ending else until
        if is_ending:
            ends[first] = now - arrivals[first]
        else:
            left[first] -= work
            heappush(waiting, (left[first] if is_by_remaining else works[first], first))
    return list(zip(ends, middles, strict=True))
