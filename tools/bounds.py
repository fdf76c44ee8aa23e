"""What no schedule of a whole trace can beat, not even one that knows every arrival and every length in advance.

The bounds know the machine of simulation.py: what a step, a row and a prompt token cost, the pages of the pool and how
many a sequence takes, the prompt tokens of a step. They give it more than it has: any part of a step can be worked on
at any time, parks and restores cost nothing, slots never run out. optimum.py has the exact optimum, for a few requests.
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
NUM_TIMES = 400  # at which the makespan's bound is looked at


def alone_ms(request: Request, costs: Costs, batch_tokens: int) -> float:
    """From arrival to end with the server to itself."""
    num_steps = math.ceil(request.prompt_len / batch_tokens) + request.answer_len - 1
    return num_steps * costs.step_ms + costs.row_ms * request.answer_len + costs.token_ms * (request.prompt_len - 1)


@dataclass(frozen=True, slots=True)
class Shares:
    """What requests take of the server's time at least: of each step the part of the pool that they fill, and what
    their own tokens cost. The shares in a step add up to no more than the step, so no schedule does more than one
    millisecond of shares in a millisecond.
    """

    costs: Costs
    limits: Limits

    def of(self, prompt_len: Floats, num_tokens: Floats) -> Floats:
        """Milliseconds until `num_tokens` of the answer are there. A chunk before the last leaves at most a full chunk
        for each that follows.
        """
        costs, limits = self.costs, self.limits
        pages = self._pages_below(prompt_len + num_tokens) - self._pages_below(prompt_len)
        for number in range(1, math.ceil(prompt_len.max() / limits.batch_tokens)):
            pages += np.ceil(np.maximum(0, prompt_len - number * limits.batch_tokens) / limits.page_size)
        ms = costs.step_ms * pages / limits.num_pages + costs.row_ms * num_tokens + costs.token_ms * (prompt_len - 1)
        return np.asarray(np.where(num_tokens > 0, ms, 0.0))

    def _pages_below(self, num_cells: Floats) -> Floats:
        """The sum of the pages of 1, 2, ... `num_cells` - 1 cells."""
        size = self.limits.page_size
        full, rest = np.divmod(num_cells - 1, size)
        return np.asarray(size * full * (full + 1) / 2 + rest * (full + 1))

    def done_by(self, now_ms: float, requests: Floats) -> Floats:
        """The most of each share that can be done by then: what a request gets done alone, since it came. The step
        that is running, and a prompt that is being computed, count as done.
        """
        costs = self.costs
        arrival_ms, prompt_len, answer_len = requests
        chunks = np.ceil(prompt_len / self.limits.batch_tokens)
        first_ms = chunks * costs.step_ms + costs.token_ms * (prompt_len - 1) + costs.row_ms
        further = np.ceil(np.maximum(0.0, now_ms - arrival_ms - first_ms) / (costs.step_ms + costs.row_ms))
        tokens = np.where(now_ms > arrival_ms, np.minimum(answer_len, 1 + further), 0.0)
        return self.of(prompt_len, tokens)


def bound(requests: Sequence[Request], costs: Costs, limits: Limits) -> tuple[float, float]:
    """Makespan and mean completion, in milliseconds.

    Makespan: at any time, the shares that cannot have been done yet are still to do. Completion: one machine that works
    off the shares, shortest remaining first, which is optimal there; and nobody is faster than alone.
    """
    table = np.array([(each.arrival_ms, each.prompt_len, each.answer_len) for each in requests]).T  # [3, requests]
    shares = Shares(costs, limits)
    whole = shares.of(table[1], table[2])
    alone = np.array([alone_ms(each, costs, limits.batch_tokens) for each in requests])
    times = np.linspace(0.0, table[0].max() + 1.0, NUM_TIMES)
    makespan = max((table[0] + alone).max(), *(at + (whole - shares.done_by(at, table)).sum() for at in times))
    by_shares = shortest_remaining_first(table[0].tolist(), whole.tolist())
    return float(makespan), float(max(mean(by_shares), alone.mean()))


def shortest_remaining_first(arrivals: Sequence[float], works: Sequence[float]) -> list[float]:
    """Times from arrival to end on one machine."""
    waiting: list[tuple[float, int]] = []
    completions = [0.0] * len(works)
    now = 0.0
    number = 0
    while number < len(works) or waiting:
        if not waiting:
            now = max(now, arrivals[number])
        while number < len(works) and arrivals[number] <= now:
            heappush(waiting, (works[number], number))
            number += 1
        left, first = heappop(waiting)
        until = arrivals[number] if number < len(works) else math.inf
        if now + left <= until:
            now += left
            completions[first] = now - arrivals[first]
        else:
            heappush(waiting, (left - (until - now), first))
            now = until
    return completions
