"""The best that any schedule could do with a few requests that come at once, exactly, by looking at every state.

The machine is the simulator's: a step costs `step_ms`, `row_ms` for each sequence that gets a token and `token_ms` for
each prompt token; a sequence with m prompt tokens and k of its answer takes m + k cells of the pool in the step that
gives the next one. Better than any real server, it computes every prompt in one step and parks and restores in no time,
between any two steps, as often as it likes. Everything else about a schedule is which requests get a token in the next
step, so the state is how many tokens each has, and the optimum follows from the last token backwards.

What the schedule knows of an answer's length is `chances`: the chance that it has 1, 2, ... tokens, given before the
first step. A certain length makes it clairvoyant. With more than one possible length it learns that an answer ends when
it ends, as every server does, and the optimum is that of the expectation: no online policy is better on average, be it
one that knows the distribution and has for ever to think.

A schedule may be held to `parks_when_full`: whoever got a token gets one in every step until its end, unless those who
should do not fit together. Then the state is also who got one in the step before.

States are all combinations of numbers of tokens: five requests of at most nine are 10^5, and take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tools.simulation import Costs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def certain(length: int) -> list[float]:
    """The chances of an answer whose length is known."""
    return [0.0] * (length - 1) + [1.0]


def optimum(
    prompts: Sequence[int],
    chances: Sequence[Sequence[float]],
    cells: int,
    costs: Costs,
    *,
    parks_when_full: bool = False,
) -> tuple[float, float]:
    """The least expected makespan and the least expected mean completion, in milliseconds; each by a schedule of its
    own. Every request must fit alone.
    """
    world = _World(prompts, chances, cells, costs, parks_when_full)
    values = np.zeros((2, world.num_sets, world.tokens.shape[1]))
    for states in world.levels():
        values[:, :, states] = world.best(states, values)
    return float(values[0, 0, 0]), float(values[1, 0, 0]) / len(prompts)


class _World:
    """States are numbered; request i has `tokens[i, state]` of its answer, or has ended when that is `ended[i]`. Sets
    of requests are numbers, too: bit i is request i. The set that goes with a state is who got a token in the step
    before and has not ended; always the empty one, where that is of no consequence.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        chances: Sequence[Sequence[float]],
        cells: int,
        costs: Costs,
        parks_when_full: bool,
    ) -> None:
        shape = tuple(len(each) + 1 for each in chances)
        self.tokens: Ints = np.indices(shape).reshape(len(shape), -1)  # [requests, states]
        self._ended = np.array([len(each) for each in chances])
        self._strides = [int(np.prod(shape[number + 1 :])) for number in range(len(shape))]
        self._hazards = [_hazards(each) for each in chances]
        self._prompts = np.array(prompts)[:, None]
        self._cells = cells
        self._costs = costs
        self._parks_when_full = parks_when_full
        self.num_sets = 1 << len(prompts) if parks_when_full else 1
        requests = range(len(prompts))
        self._choices = [list(each) for count in requests for each in combinations(requests, count + 1)]

    def levels(self) -> list[Ints]:
        """The states in groups, from the last on, so that a step from one always leads to groups before it; the state
        in which all have ended is left out.
        """
        progress = self.tokens.sum(axis=0)
        order = np.argsort(-progress, kind="stable")
        cuts = np.flatnonzero(np.diff(progress[order])) + 1
        return [np.asarray(each) for each in np.split(order, cuts)[1:]]

    def best(self, states: Ints, values: Floats) -> Floats:
        """Of the best choice in each of `states`: expected milliseconds to the end, and summed over those that have
        not ended. [2, sets, states]
        """
        tokens = self.tokens[:, states]
        is_live = tokens < self._ended[:, None]
        weights = np.stack([np.ones(len(states)), is_live.sum(axis=0)])
        held = np.where(is_live, self._prompts + tokens, self._cells + 1)  # one that has ended is no choice
        prompt_ms = np.where(tokens == 0, self._costs.token_ms * (self._prompts - 1), 0.0)
        least = np.full((2, self.num_sets, len(states)), np.inf)
        for chosen in self._choices:
            members = sum(1 << number for number in chosen)
            (fits,) = np.nonzero(held[chosen].sum(axis=0) <= self._cells)
            if fits.size:
                step_ms = (
                    self._costs.step_ms + self._costs.row_ms * len(chosen) + prompt_ms[chosen][:, fits].sum(axis=0)
                )
                after = self._expected(chosen, states[fits], tokens[:, fits], values)
                value = weights[:, fits] * step_ms + after
                for before in range(self.num_sets):
                    if not before & ~members:
                        least[:, before, fits] = np.minimum(least[:, before, fits], value)
        for before in range(1, self.num_sets):  # the empty set may choose as it likes, and so may who does not fit
            is_full = held[[number for number in range(len(held)) if before >> number & 1]].sum(axis=0) > self._cells
            least[:, before, is_full] = least[:, 0, is_full]
        return least

    def _expected(self, chosen: list[int], states: Ints, tokens: Ints, values: Floats) -> Floats:
        """What is left on average once the `chosen` have one token more, and some of them have ended. [2, states]"""
        branches = [(np.ones(len(states)), states, 0)]
        for number in chosen:
            member = 1 << number if self._parks_when_full else 0
            ends = self._hazards[number][tokens[number]]
            to_end = (self._ended[number] - tokens[number]) * self._strides[number]
            kinds = [(ends, to_end, 0), (1 - ends, np.full(len(states), self._strides[number]), member)]
            kinds = [each for each in kinds if each[0].any()]
            # Where the chance is 0 the move may lead out of the world; nobody goes there.
            branches = [
                (chance * kind, at + np.where(kind > 0, move, 0), before | remaining)
                for chance, at, before in branches
                for kind, move, remaining in kinds
            ]  # fmt: skip
        return np.asarray(np.sum([chance * values[:, before, at] for chance, at, before in branches], axis=0))


def _hazards(chances: Sequence[float]) -> Floats:
    """With k tokens, the chance that the next one is the last; 1 when all others have been ruled out."""
    left = np.cumsum(np.array(chances)[::-1])[::-1]
    hazards = np.divide(chances, left, out=np.ones(len(chances)), where=left > 0)
    hazards[-1] = 1.0
    return np.append(hazards, 0.0)  # it has ended; no choice
