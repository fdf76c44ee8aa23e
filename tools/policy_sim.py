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
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean, stdev

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
    runs: tuple[tuple[float, ...], ...]  # what it is judged by, run by run; less is better
    makespan_s: float
    completion_s: float  # mean, from arrival to end
    gap_ms: float  # p99 between two tokens of one answer
    num_parks: float
    moved: float  # tokens copied out and back, and those computed again
    fairness: float  # Jain's index of how many times longer than alone each took; 1 is equal


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


def judge(requests: Sequence[Request], outcome: Outcome, costs: Costs, limits: Limits) -> tuple[float, ...]:
    """The fields of a `Result` after its name."""
    alone = [alone_ms(each, costs, limits.batch_tokens) for each in requests]
    ratios = [took / ms for took, ms in zip(outcome.completions, alone, strict=True)]
    fairness = sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios))
    times = (outcome.makespan_ms / 1e3, mean(outcome.completions) / 1e3, outcome.gap_ms(0.99))
    return (*times, sum(outcome.parks), outcome.num_copied + outcome.num_recomputed, fairness)


def pareto_front(results: Sequence[Result]) -> list[Result]:
    """Those that no other beats: better in something and worse in nothing, where twice the standard error of the runs
    and 0.1 % are no difference.
    """

    def is_beaten(one: Result, other: Result) -> bool:
        kinds = [
            _difference([math.log((a + 1e-9) / (b + 1e-9)) for a, b in zip(ours, theirs, strict=True)])
            for ours, theirs in zip(zip(*other.runs, strict=True), zip(*one.runs, strict=True), strict=True)
        ]
        return -1 in kinds and 1 not in kinds

    return [each for each in results if not any(is_beaten(each, other) for other in results)]


def _difference(values: list[float]) -> int:
    """-1, 0 or 1: whether they are below, about or above zero."""
    middle = mean(values)
    error = 2 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return 0 if abs(middle) <= max(error, 0.001) else int(math.copysign(1, middle))


def pool_pages(requests: Sequence[Request], limits: Limits, costs: Costs, oversubscription: float) -> int:
    """The pages held on average without a limit, divided by `oversubscription`; at least the largest request's."""
    plenty = Limits(1 << 16, limits.page_size, limits.num_slots, limits.batch_tokens, max_queue=len(requests))
    outcome = Simulation(plenty, costs).run(requests)
    average = outcome.held_page_ms / outcome.makespan_ms
    largest = max(each.prompt_len + each.answer_len for each in requests)
    return max(math.ceil(average / oversubscription), -(-largest // limits.page_size))


def compare(runs: Sequence[tuple[list[Request], Limits]], costs: Costs) -> list[Result]:
    """The average over `runs` of each policy: one run's differences are half chance."""
    results = []
    for name, policy in POLICIES.items():
        each = [
            judge(requests, Simulation(limits, costs, policy).run(requests), costs, limits) for requests, limits in runs
        ]
        judged = tuple((*times, moved, 1 / fairness) for *times, _, moved, fairness in each)
        results.append(Result(name, judged, *(mean(values) for values in zip(*each, strict=True))))
    return results


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
            each.name, f"{each.makespan_s:.1f}", f"{each.completion_s:.2f}", f"{each.gap_ms:.1f}",
            f"{each.num_parks:.0f}", f"{each.moved:,.0f}", f"{each.fairness:.3f}", "yes" if each in front else "no",
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
    parser.add_argument("--requests", type=int, default=1000, help="how many of them in a run (1000)")
    parser.add_argument("--runs", type=int, default=4, help="stretches of the trace, or draws, to average over (4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--oversubscription", type=float, default=1.5)
    parser.add_argument("--small", type=int, default=20, metavar="COUNT", help="small instances beside the bound (20)")
    parser.add_argument("--output", type=Path, help="write the tables there as well")
    for name in ("step_ms", "row_ms", "token_ms", "copy_gb_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Costs(), name))
    return parser.parse_args(arguments)


def request_lists(options: argparse.Namespace) -> list[list[Request]]:
    """One list for each run, each beginning at time 0."""
    if not options.trace:
        return [take(conversations(options.seed + number), options.requests) for number in range(options.runs)]
    source = read_trace(options.trace)
    lists = [take(source, options.requests) for _ in range(options.runs)]
    return [[replace(each, arrival_ms=each.arrival_ms - part[0].arrival_ms) for each in part] for part in lists if part]


def limited(requests: list[Request], options: argparse.Namespace, costs: Costs) -> tuple[list[Request], Limits]:
    limits = Limits(1, 16, options.slots, 2048, max_queue=len(requests))
    return requests, replace(limits, num_pages=pool_pages(requests, limits, costs, options.oversubscription))


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    costs = Costs(options.step_ms, options.row_ms, options.token_ms, options.copy_gb_s)
    runs = [limited(requests, options, costs) for requests in request_lists(options)]
    results = compare(runs, costs)
    where = options.trace.name if options.trace else f"drawn with seeds from {options.seed} on"
    is_on_front = SHIPPED in (each.name for each in pareto_front(results))
    makespan, completion = (
        mean(values) for values in zip(*(bound(each, costs, limits) for each, limits in runs), strict=True)
    )
    pools = ", ".join(str(limits.num_pages) for _, limits in runs)
    text = f"""# Policies

`python -m tools.policy_sim {" ".join(each.rsplit("/", 1)[-1] if each[0] == "/" else each for each in arguments)}`

The average of {len(runs)} runs of {options.requests} requests each ({where}). Pools of
{pools} pages of 16 cells, {options.slots} slots, {costs.step_ms} ms a step, {costs.row_ms} ms a row,
{costs.token_ms} ms a prompt token, copies at {costs.copy_gb_s} GB/s. No schedule, and be it one that knows every
answer's length, could have a makespan below {makespan / 1e3:.1f} s or a mean completion below {completion / 1e3:.2f} s.

{comparison_table(results)}

The shipped policy is {"" if is_on_front else "not "}on the Pareto front. A difference within twice the standard error
of the runs, or of less than 0.1 %, counts as none.
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
