"""The exact optimum of small instances: against sums by hand, and against what the real ledger does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from statistics import mean

import pytest

from pyserve.ledger import Limits
from pyserve.policy import Policy
from tools.bounds import bound
from tools.optimum import certain, optimum
from tools.policy_sim import POLICIES, REFERENCES
from tools.simulation import Costs, Request, Simulation
from tools.small_instances import BEST_ONLINE, Small, ratios

COSTS = Costs(step_ms=10.0, row_ms=1.0, token_ms=0.5, copy_gb_s=1.0, token_bytes=1000)


def test_one_request_takes_what_its_steps_cost() -> None:
    expected = (10.0 + 1.0 + 4 * 0.5) + 2 * (10.0 + 1.0)
    assert optimum([5], [certain(3)], 7, COSTS) == pytest.approx((expected, expected))


def test_the_expectation_is_over_the_answers_that_there_may_be() -> None:
    first, further = 10.0 + 1.0 + 4 * 0.5, 10.0 + 1.0
    expected = first + 0.5 * further + 0.25 * further
    assert optimum([5], [[0.5, 0.25, 0.25]], 7, COSTS) == pytest.approx((expected, expected))


def test_two_that_fit_together_share_every_step() -> None:
    together = 10.0 + 2 * 1.0
    assert optimum([1, 1], [certain(2)] * 2, 4, COSTS) == pytest.approx((2 * together, 2 * together))


def test_where_only_one_fits_the_shorter_goes_first() -> None:
    makespan, completion = optimum([1, 1], [certain(5), certain(2)], 5, Costs(10.0, 0.0, 0.0))
    # Together they would hold 1 + 1, 2 + 2 cells: two steps side by side, then the longer one alone.
    assert (makespan, completion) == pytest.approx((50.0, mean([20.0, 50.0])))
    makespan, completion = optimum([3, 3], [certain(3), certain(1)], 5, Costs(10.0, 0.0, 0.0))
    assert (makespan, completion) == pytest.approx((40.0, mean([10.0, 40.0])))


def worlds() -> list[tuple[list[int], list[float], int]]:
    """Prompts, the chances of 1, 2, ... tokens, cells."""
    return [([7, 2, 4], [0.3, 0.0, 0.2, 0.5], 11), ([1, 1, 1], [0.5, 0.1, 0.1, 0.1, 0.2], 6), ([3, 5], [0.2, 0.8], 7)]


@cache
def with_known(prompts: tuple[int, ...], answers: tuple[int, ...], cells: int) -> tuple[float, float]:
    return optimum(prompts, [certain(each) for each in answers], cells, COSTS)


@pytest.mark.parametrize(("prompts", "chances", "cells"), worlds())
@pytest.mark.parametrize("name", POLICIES | REFERENCES)
def test_no_policy_beats_the_optimum(prompts: list[int], chances: list[float], cells: int, name: str) -> None:
    """With known answers it beats none in any draw; with unknown ones none in expectation, unless it knows."""
    limits = Limits(cells, 1, len(prompts), 100, runway_steps=0, is_async=False)
    expected_span = expected_completion = 0.0
    for answers in product(range(1, len(chances) + 1), repeat=len(prompts)):
        requests = [Request(0.0, *lengths) for lengths in zip(prompts, answers, strict=True)]
        outcome = Simulation(limits, COSTS, (POLICIES | REFERENCES)[name]).run(requests)
        span, completion = with_known(tuple(prompts), answers, cells)
        assert outcome.makespan_ms >= span - 1e-6 and mean(outcome.completions) >= completion - 1e-6
        chance = 1.0
        for answer in answers:
            chance *= chances[answer - 1]
        expected_span += chance * outcome.makespan_ms
        expected_completion += chance * mean(outcome.completions)
    if name in POLICIES:
        span, completion = optimum(prompts, [chances] * len(prompts), cells, COSTS)
        assert expected_span >= span - 1e-6 and expected_completion >= completion - 1e-6


@pytest.mark.parametrize(("prompts", "chances", "cells"), worlds())
def test_who_does_not_know_the_answers_does_no_better(prompts: list[int], chances: list[float], cells: int) -> None:
    known = [0.0, 0.0]
    for answers in product(range(1, len(chances) + 1), repeat=len(prompts)):
        pair = with_known(tuple(prompts), answers, cells)
        for answer in answers:
            pair = (pair[0] * chances[answer - 1], pair[1] * chances[answer - 1])
        known = [known[0] + pair[0], known[1] + pair[1]]
    unknown = optimum(prompts, [chances] * len(prompts), cells, COSTS)
    assert unknown[0] >= known[0] - 1e-6 and unknown[1] >= known[1] - 1e-6
    assert len(prompts) == 2 or unknown != pytest.approx(known), "and sometimes worse"


def test_the_bound_on_a_trace_never_exceeds_the_optimum() -> None:
    """Where everybody comes at once and every prompt is one chunk, both are of the same machine."""
    dice = random.Random(5)
    tightness = []
    for _ in range(60):
        count = dice.randint(1, 4)
        prompts, answers = ([dice.randint(1, most) for _ in range(count)] for most in (12, 6))
        cells = max(map(sum, zip(prompts, answers, strict=True))) + dice.randint(0, 8)
        costs = Costs(dice.choice([1.0, 10.0]), dice.choice([0.0, 1.0, 5.0]), dice.choice([0.0, 0.5, 5.0]))
        limits = Limits(cells, 1, count, 1000)
        requests = [Request(0.0, *lengths) for lengths in zip(prompts, answers, strict=True)]
        best = optimum(prompts, [certain(each) for each in answers], cells, costs)
        tightness.append([least / most for least, most in zip(bound(requests, costs, limits), best, strict=True)])
        assert max(tightness[-1]) <= 1 + 1e-9
    assert min(mean(each) for each in zip(*tightness, strict=True)) > 0.85


def by_hand(prompts: list[int], answers: list[int], cells: int) -> tuple[float, float]:
    """Known answers, all schedules that park only when those who run do not fit, one by one."""

    def ways(tokens: tuple[int, ...], before: frozenset[int]) -> Iterator[tuple[float, float]]:
        live = [number for number, answer in enumerate(answers) if tokens[number] < answer]
        if not live:
            yield 0.0, 0.0
        held = {number: prompts[number] + tokens[number] for number in live}
        must = before.intersection(live)
        if sum(held[number] for number in must) > cells:
            must = frozenset()
        for chosen in (frozenset(each) for size in range(1, len(live) + 1) for each in combinations(live, size)):
            if must <= chosen and sum(held[number] for number in chosen) <= cells:
                new = sum(prompts[number] - 1 for number in chosen if not tokens[number])
                step_ms = COSTS.step_ms + COSTS.row_ms * len(chosen) + COSTS.token_ms * new
                after = tuple(count + (number in chosen) for number, count in enumerate(tokens))
                for span, ends in ways(after, chosen):
                    yield span + step_ms, ends + len(live) * step_ms

    spans, ends = zip(*ways((0,) * len(prompts), frozenset()), strict=True)
    return min(spans), min(ends) / len(prompts)


@pytest.mark.parametrize(
    ("prompts", "answers", "cells"),
    [([1, 1, 1], [4, 3, 2], 7), ([2, 1, 3], [1, 4, 2], 6), ([3, 3], [3, 3], 7), ([1, 1, 1], [3, 3, 3], 6)],
)
def test_who_parks_only_when_full_keeps_to_it(prompts: list[int], answers: list[int], cells: int) -> None:
    found = optimum(prompts, [certain(each) for each in answers], cells, COSTS, parks_when_full=True)
    assert found == pytest.approx(by_hand(prompts, answers, cells))


def test_parking_without_need_may_win() -> None:
    """Three of which two fit: a turn each, and all three end with nobody alone in a step."""
    prompts, chances = [3, 3, 3], [certain(2)] * 3
    free, held = (optimum(prompts, chances, 8, COSTS, parks_when_full=when_full)[0] for when_full in (False, True))
    rows_ms = 6 * COSTS.row_ms + 3 * 2 * COSTS.token_ms
    assert (free, held) == pytest.approx((3 * COSTS.step_ms + rows_ms, 4 * COSTS.step_ms + rows_ms))


def test_a_policy_is_told_as_multiples_of_both_optima() -> None:
    """Two that never fit together: without knowing, the first is as good as the second, and half of the time wrong."""
    chances, cells = [0.5, 0.0, 0.0, 0.5], 12
    draws = [[1, 4], [4, 1]]
    known = [optimum([8, 8], [certain(each) for each in answers], cells, COSTS) for answers in draws]
    unknown = optimum([8, 8], [chances] * 2, cells, COSTS)
    spans, completions = zip(*known, strict=True)
    small = Small([8, 8], draws, cells, (mean(spans), mean(completions)), unknown)
    told = ratios([small], COSTS, {"shipped": Policy()})
    assert list(told) == [BEST_ONLINE, "shipped"]
    (shipped,) = told["shipped"]
    assert shipped.of_known[0] == pytest.approx(1.0), "one after the other, in whatever order"
    # 1 + 4 steps of one row and a prompt each, the long one first in one draw of two.
    first, further = 10.0 + 1.0 + 7 * 0.5, 10.0 + 1.0
    short, long = first, first + 3 * further
    fcfs = mean([(short + short + long) / 2, (long + long + short) / 2])
    assert shipped.of_known[1] == pytest.approx(fcfs / ((short + short + long) / 2))
