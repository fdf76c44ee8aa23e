"""Which policy is best: victims, restores and admissions compared on one trace, through the real ledger.

    python -m tools.policy_sim                                   # requests drawn in the shape of Azure's conversations
    python -m tools.policy_sim --trace azure-2023-conv.csv --requests 2000
    python -m tools.policy_sim --output bench/results/policy_sim.md

The pool is what the requests hold on average when it has no limit, divided by `--oversubscription`. Prints one row per
policy, whether the shipped one is on the Pareto front, and how far small instances are from a bound that no schedule
can beat, one that knows every answer's length in advance included.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean

from pyserve.ledger import Limits
from pyserve.policy import Policy
from tools.simulation import Costs, Outcome, Request, Simulation, conversations, read_trace, take

SHIPPED = "shipped: smallest, most parked first"
BEST_FOUND = "best of many orders, answers known"
NUM_ORDERS = 40

POLICIES: dict[str, Policy] = {
    SHIPPED: Policy(),
    "victim: least computed": Policy(victim=lambda _, each: each.num_computed),
    "victim: youngest": Policy(victim=lambda _, each: -each.id),
    "victim: largest": Policy(victim=lambda pool, each: -pool.num_own(each.pages)),
    "victim: cost-aware": Policy(victim=lambda pool, each: pool.num_own(each.pages) * (1 + each.num_parks)),
    "restore: longest parked": Policy(restore=lambda each: (0.0, each.parked_at_ms or 0.0, each.id)),
    "restore: smallest": Policy(restore=lambda each: (len(each.tokens), 0.0, each.id)),
    "restore: oldest request": Policy(restore=lambda each: (0.0, 0.0, each.id)),
    "admission: room for 128 more": Policy(predicted_tokens=128),
    "admission: room for 256 more": Policy(predicted_tokens=256),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one list of requests. Times in seconds."""

    name: str
    makespan_s: float
    completion_s: float  # mean, from arrival to end
    gap_ms: float  # p99 between two tokens of one answer
    num_parks: int
    moved: int  # tokens copied out and back, and those computed again
    fairness: float  # Jain's index of how many times longer than alone each took; 1 is equal

    @property
    def costs(self) -> tuple[float, ...]:
        """What a policy is judged by, to three digits; less is better."""
        numbers = (self.makespan_s, self.completion_s, self.gap_ms, float(self.moved), -self.fairness)
        return tuple(float(f"{number:.3g}") for number in numbers)


def alone_ms(request: Request, costs: Costs, batch_tokens: int) -> float:
    """From arrival to end with the server to itself."""
    num_steps = math.ceil(request.prompt_len / batch_tokens) + request.answer_len - 1
    return num_steps * costs.step_ms + costs.row_ms * request.answer_len + costs.token_ms * (request.prompt_len - 1)


def share_ms(request: Request, costs: Costs, pool_cells: int) -> float:
    """Its share of the server's time at least: of each step the part of the pool that it fills, and its own rows.

    The shares of those in a step add up to no more than the step, so no schedule does more than one millisecond of
    shares in a millisecond.
    """
    n, m = request.answer_len, request.prompt_len
    cell_steps = n * m + n * (n - 1) / 2
    return costs.step_ms * cell_steps / pool_cells + costs.row_ms * n + costs.token_ms * (m - 1)


def bound(requests: Sequence[Request], costs: Costs, limits: Limits) -> tuple[float, float]:
    """Makespan and mean completion, in milliseconds, that no schedule beats, whatever it knows in advance.

    Completion: one machine that works off the shares, shortest remaining first, which is optimal there, and nobody
    faster than alone.
    """
    shares = [share_ms(each, costs, limits.context_len) for each in requests]
    alone = [alone_ms(each, costs, limits.batch_tokens) for each in requests]
    makespan = max(each.arrival_ms + ms for each, ms in zip(requests, alone, strict=True))
    for index, each in enumerate(requests):
        makespan = max(makespan, each.arrival_ms + sum(shares[index:]))
    by_shares = _shortest_remaining_first([each.arrival_ms for each in requests], shares)
    return makespan, max(mean(by_shares), mean(alone))


def _shortest_remaining_first(arrivals: Sequence[float], works: Sequence[float]) -> list[float]:
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


def judge(name: str, requests: Sequence[Request], outcome: Outcome, costs: Costs, limits: Limits) -> Result:
    alone = [alone_ms(each, costs, limits.batch_tokens) for each in requests]
    ratios = [took / ms for took, ms in zip(outcome.completions, alone, strict=True)]
    return Result(
        name,
        outcome.makespan_ms / 1e3,
        mean(outcome.completions) / 1e3,
        outcome.gap_ms(0.99),
        sum(outcome.parks),
        outcome.num_copied + outcome.num_recomputed,
        sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios)),
    )


def pareto_front(results: Sequence[Result]) -> list[Result]:
    """Those that no other beats: none is as good in everything and better in something."""

    def is_beaten(one: Result, other: Result) -> bool:
        return other.costs != one.costs and all(a <= b for a, b in zip(other.costs, one.costs, strict=True))

    return [each for each in results if not any(is_beaten(each, other) for other in results)]


def pool_pages(requests: Sequence[Request], limits: Limits, costs: Costs, oversubscription: float) -> int:
    """The pages held on average without a limit, divided by `oversubscription`; at least the largest request's."""
    plenty = Limits(1 << 16, limits.page_size, limits.num_slots, limits.batch_tokens, max_queue=len(requests))
    outcome = Simulation(plenty, costs).run(requests)
    average = outcome.held_page_ms / outcome.makespan_ms
    largest = max(each.prompt_len + each.answer_len for each in requests)
    return max(math.ceil(average / oversubscription), -(-largest // limits.page_size))


def compare(requests: Sequence[Request], limits: Limits, costs: Costs) -> list[Result]:
    return [
        judge(name, requests, Simulation(limits, costs, policy).run(requests), costs, limits)
        for name, policy in POLICIES.items()
    ]


def small_instances(count: int, costs: Costs) -> dict[str, list[tuple[float, float]]]:
    """For each policy, makespan and mean completion of each instance as multiples of its bound: 12 requests that come
    at once and a pool for about three of them.
    """
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in (*POLICIES, BEST_FOUND)}
    for seed in range(count):
        requests = [Request(0.0, r.prompt_len // 4 + 1, r.answer_len) for r in take(conversations(seed), 12)]
        largest = max(each.prompt_len + each.answer_len for each in requests)
        cells = max(largest, sum(each.prompt_len + each.answer_len for each in requests) // 4)
        limits = Limits(-(-cells // 16), 16, 12)
        makespan, completion = bound(requests, costs, limits)
        for name, policy in POLICIES.items():
            outcome = Simulation(limits, costs, policy).run(requests)
            ratios[name].append((outcome.makespan_ms / makespan, mean(outcome.completions) / completion))
        found = best_found(requests, limits, costs, seed)
        ratios[BEST_FOUND].append((found[0] / makespan, found[1] / completion))
    return ratios


def best_found(requests: Sequence[Request], limits: Limits, costs: Costs, seed: int) -> tuple[float, float]:
    """The best makespan and the best mean completion among many orders of arrival, answers known: the bound is not
    always within reach, this is.
    """
    dice = random.Random(seed)
    orders = [sorted(requests, key=lambda each: sign * share_ms(each, costs, limits.context_len)) for sign in (1, -1)]
    orders += [dice.sample(requests, len(requests)) for _ in range(NUM_ORDERS)]
    outcomes = [Simulation(limits, costs).run(order) for order in orders]
    return min(each.makespan_ms for each in outcomes), min(mean(each.completions) for each in outcomes)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def comparison_table(results: Sequence[Result]) -> str:
    front = pareto_front(results)
    header = ("policy", "makespan s", "mean completion s", "p99 gap ms", "parks", "tokens moved", "fairness", "front")
    rows = [
        (
            each.name, f"{each.makespan_s:.1f}", f"{each.completion_s:.2f}", f"{each.gap_ms:.1f}", f"{each.num_parks}",
            f"{each.moved:,}", f"{each.fairness:.3f}", "yes" if each in front else "no",
        )
        for each in results
    ]  # fmt: skip
    return table(header, rows)


def bound_table(ratios: dict[str, list[tuple[float, float]]]) -> str:
    header = ("policy", "makespan / bound, mean", "worst", "mean completion / bound, mean", "worst")
    rows = []
    for name, pairs in ratios.items():
        spans, completions = zip(*pairs, strict=True)
        rows.append((name, *(f"{f(values):.3f}" for values in (spans, completions) for f in (mean, max))))
    return table(header, rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.policy_sim", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, help="a CSV or JSON-lines trace; requests are drawn when none is given")
    parser.add_argument("--requests", type=int, default=1000, help="how many of them (1000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--oversubscription", type=float, default=1.5)
    parser.add_argument("--small", type=int, default=20, metavar="COUNT", help="small instances beside the bound (20)")
    parser.add_argument("--output", type=Path, help="write the tables there as well")
    for name in ("step_ms", "row_ms", "token_ms", "copy_gb_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Costs(), name))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    costs = Costs(options.step_ms, options.row_ms, options.token_ms, options.copy_gb_s)
    source = read_trace(options.trace) if options.trace else conversations(options.seed)
    requests = take(source, options.requests)
    limits = Limits(1, 16, options.slots, 2048, max_queue=len(requests))
    num_pages = pool_pages(requests, limits, costs, options.oversubscription)
    limits = Limits(num_pages, 16, options.slots, 2048, max_queue=len(requests))
    results = compare(requests, limits, costs)
    where = options.trace.name if options.trace else f"drawn with seed {options.seed}"
    is_on_front = SHIPPED in (each.name for each in pareto_front(results))
    makespan, completion = bound(requests, costs, limits)
    text = f"""# Policies

`python -m tools.policy_sim {" ".join(argument.rsplit("/", 1)[-1] for argument in arguments)}`

{len(requests)} requests ({where}), {num_pages} pages of 16 cells, {options.slots} slots, {costs.step_ms} ms a step,
{costs.row_ms} ms a row, {costs.token_ms} ms a prompt token, copies at {costs.copy_gb_s} GB/s. No schedule could have
a makespan below {makespan / 1e3:.1f} s or a mean completion below {completion / 1e3:.2f} s.

{comparison_table(results)}

The shipped policy is {"" if is_on_front else "not "}on the Pareto front.
"""
    if options.small:
        text += f"""
{options.small} small instances of 12 requests at once on a pool for about three, as multiples of the bound:

{bound_table(small_instances(options.small, costs))}
"""
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
