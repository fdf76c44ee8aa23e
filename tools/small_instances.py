"""Policies against the exact optimum: a few requests at once, answers drawn again and again, through the real ledger.

A token, a cell and a step stand for `SCALE` of them, and cost as much, so that optimum.py can look at every state. The
policy pays for what the optimum gets for nothing: it copies when it parks and restores.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from pyserve.ledger import Limits
from pyserve.policy import Policy
from tools.optimum import certain, optimum
from tools.simulation import ANSWERS, PROMPTS, Costs, Request, Simulation, length_at

SCALE = 64
NUM_REQUESTS = 5
NUM_DRAWS = 60  # of answers, for each instance
NUM_SHARES = 10_000  # at which the distribution of answers is looked at
BEST_ONLINE = "the best that any policy can do without knowing the answers"
BEST_WHEN_FULL = "the best that parks only when full, without knowing the answers"

Pair = tuple[float, float]  # makespan and mean completion


@dataclass(frozen=True, slots=True)
class Small:
    """An instance with its optima, in milliseconds, on average over the draws."""

    prompts: list[int]
    draws: list[list[int]]  # answers
    cells: int
    known: Pair  # the optimum when the answers are known
    unknown: Pair  # when only their distribution is
    when_full: Pair | None = None  # the same for schedules that park only when those who run do not fit


@dataclass(frozen=True, slots=True)
class Multiples:
    """How far a policy is from the optima of one instance."""

    of_known: Pair
    of_unknown: Pair


def scaled(length: int) -> int:
    return math.ceil(length / SCALE)


def scaled_costs(costs: Costs) -> Costs:
    ms = (costs.step_ms * SCALE, costs.row_ms * SCALE, costs.token_ms * SCALE)
    return Costs(*ms, costs.copy_gb_s, costs.token_bytes * SCALE)


def instance(seed: int, costs: Costs, oversubscription: float, *, is_when_full: bool = False) -> Small:
    """`costs` are scaled. The pool is what all hold at their end on average, divided by `oversubscription`, but every
    request fits alone. `is_when_full`: with the optimum of schedules that park only then, which takes longest.
    """
    counts = Counter(scaled(length_at(ANSWERS, (number + 0.5) / NUM_SHARES)) for number in range(NUM_SHARES))
    chances = [counts[length] / NUM_SHARES for length in range(1, max(counts) + 1)]
    dice = random.Random(seed)
    prompts = [scaled(length_at(PROMPTS, dice.random())) for _ in range(NUM_REQUESTS)]
    draws = [dice.choices(range(1, len(chances) + 1), chances, k=NUM_REQUESTS) for _ in range(NUM_DRAWS)]
    wanted = sum(prompts) + mean(sum(each) for each in draws)
    cells = max(max(prompts) + len(chances), round(wanted / oversubscription))
    known = _mean([optimum(prompts, [certain(each) for each in answers], cells, costs) for answers in draws])
    unknown = optimum(prompts, [chances] * NUM_REQUESTS, cells, costs)
    when_full = None
    if is_when_full:
        when_full = optimum(prompts, [chances] * NUM_REQUESTS, cells, costs, parks_when_full=True)
    return Small(prompts, draws, cells, known, unknown, when_full)


def ratios(smalls: Sequence[Small], costs: Costs, policies: Mapping[str, Policy]) -> dict[str, list[Multiples]]:
    """For each policy, and for the optima that do not know the answers, its multiples in each instance."""
    result = {BEST_ONLINE: [_multiples(each.unknown, each) for each in smalls]}
    when_full = [_multiples(each.when_full, each) for each in smalls if each.when_full is not None]
    if when_full:
        result[BEST_WHEN_FULL] = when_full
    for name, policy in policies.items():
        result[name] = [_multiples(run(each, costs, policy), each) for each in smalls]
    return result


def run(small: Small, costs: Costs, policy: Policy) -> Pair:
    """The policy's average over the draws. Its runway is less than a scaled step, and its copies end between steps."""
    policy = replace(
        policy,
        predicted_tokens=scaled(policy.predicted_tokens),
        tokens_per_place=scaled(policy.tokens_per_place),
    )
    limits = Limits(small.cells, 1, NUM_REQUESTS, NUM_REQUESTS * small.cells, runway_steps=0, is_async=False)
    outcomes = [
        Simulation(limits, costs, policy).run(
            [Request(0.0, *lengths) for lengths in zip(small.prompts, answers, strict=True)]
        )
        for answers in small.draws
    ]
    return _mean([(each.makespan_ms, mean(each.completions)) for each in outcomes])


def _multiples(pair: Pair, small: Small) -> Multiples:
    known, unknown = (
        (pair[0] / optimal[0], pair[1] / optimal[1]) for optimal in (small.known, small.unknown)
    )  # fmt: skip
    return Multiples(known, unknown)


def _mean(pairs: Sequence[Pair]) -> Pair:
    spans, completions = zip(*pairs, strict=True)
    return mean(spans), mean(completions)
