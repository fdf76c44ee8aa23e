"""Which policy is best: victims, restores and admissions compared on one trace, through the real ledger.

    python -m tools.policy_sim                                   # requests drawn in the shape of Azure's conversations
    python -m tools.policy_sim --trace azure-2023-conv.csv --requests 2000
    python -m tools.policy_sim --output bench/results/policy_sim.md --draw docs/policy.svg --when-full

The pool is what the requests hold on average when it has no limit, divided by `--oversubscription`. Prints one row per
policy and whether it is on the Pareto front, beside a bound that no schedule beats (bounds.py); then how far each is
from the exact optimum of small instances, with the answers known and unknown (optimum.py).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from pyserve.ledger import Limits
from pyserve.policy import Policy
from pyserve.sequence import Sequence as Held
from tools.bounds import alone_ms, bound
from tools.policy_chart import draw
from tools.simulation import Costs, Outcome, Request, Simulation, conversations, read_trace, take
from tools.small_instances import (
    BEST_ONLINE,
    BEST_WHEN_FULL,
    SCALE,
    Multiples,
    Pair,
    instance,
    ratios,
    scaled_costs,
)

TARGETS = (1.03, 1.05)  # makespan and mean completion, as multiples of the known optimum of small instances
SHIPPED = "shipped: smallest, most parked first"

POLICIES: dict[str, Policy] = {
    SHIPPED: Policy(),
    "victim: least computed": Policy(victim=lambda _, each: each.num_computed),
    "victim: youngest": Policy(victim=lambda _, each: -each.id),
    "victim: largest": Policy(victim=lambda pool, each: -pool.num_own(each.pages)),
    "victim: cost-aware": Policy(victim=lambda pool, each: pool.num_own(each.pages) * (1 + each.num_parks)),
    "restore: longest parked": Policy(restore=lambda each: (0.0, each.parked_at_ms or 0.0, each.id)),
    "restore: smallest": Policy(restore=lambda each: (len(each.tokens), 0.0, each.id)),
    "restore: oldest request": Policy(restore=lambda each: (0.0, 0.0, each.id)),
    "admission: first come, first served": Policy(tokens_per_place=0),
    "admission: 1024 tokens a place": Policy(tokens_per_place=1024),
    "admission: 64 tokens a place": Policy(tokens_per_place=64),
    "admission: nobody passes": Policy(max_passed=0),
    "admission: four may pass": Policy(max_passed=4),
    "admission: room for 64 tokens": Policy(predicted_tokens=64),
    "admission: room for 128 tokens": Policy(predicted_tokens=128),
    "admission: room for 256 tokens": Policy(predicted_tokens=256),
    "admission: shortest prompt first": Policy(admission=lambda each: len(each.tokens)),
}


def _cell_steps(sequence: Held) -> float:
    num_tokens = sequence.request.max_tokens or 0  # the simulation asks for exactly the answer
    return num_tokens * (sequence.prompt_len + num_tokens / 2)


CLAIRVOYANT = "knows every answer: least work first"
REFERENCES: dict[str, Policy] = {CLAIRVOYANT: Policy(admission=_cell_steps)}


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one list of requests. Times in seconds."""

    name: str
    most_parks: int  # of one request
    makespan_s: float
    completion_s: float  # mean, from arrival to end
    gap_ms: float  # p99 between two tokens of one answer
    num_parks: float
    moved: float  # tokens copied out and back, and those computed again
    fairness: float  # Jain's index of how many times longer than alone each took; 1 is equal
    of_bound: tuple[float, ...] = ()  # each run's makespan as a multiple of its bound

    @property
    def judged(self) -> tuple[float, ...]:
        """What it is judged by; less is better."""
        return (self.makespan_s, self.completion_s, self.gap_ms, self.num_parks, self.moved, -self.fairness)


def judge(requests: Sequence[Request], limits: Limits, outcome: Outcome, costs: Costs) -> tuple[float, ...]:
    """The fields of a `Result` from the makespan on."""
    alone = [alone_ms(each, costs, limits.batch_tokens) for each in requests]
    ratios = [took / ms for took, ms in zip(outcome.completions, alone, strict=True)]
    fairness = sum(ratios) ** 2 / (len(ratios) * sum(ratio * ratio for ratio in ratios))
    times = (outcome.makespan_ms / 1e3, mean(outcome.completions) / 1e3, outcome.gap_ms(0.99))
    return (*times, sum(outcome.parks), outcome.num_copied + outcome.num_recomputed, fairness)


def pareto_front(results: Sequence[Result]) -> list[Result]:
    """Those that no other beats: worse in nothing and better in something, by however little."""

    def is_beaten(one: Result, other: Result) -> bool:
        return other.judged != one.judged and all(a <= b for a, b in zip(other.judged, one.judged, strict=True))

    return [each for each in results if not any(is_beaten(each, other) for other in results)]


def pool_pages(requests: Sequence[Request], limits: Limits, costs: Costs, oversubscription: float) -> int:
    """The pages held on average without a limit, divided by `oversubscription`; at least the largest request's."""
    plenty = Limits(1 << 16, limits.page_size, limits.num_slots, limits.batch_tokens, max_queue=len(requests))
    outcome = Simulation(plenty, costs).run(requests)
    average = outcome.held_page_ms / outcome.makespan_ms
    largest = max(each.prompt_len + each.answer_len for each in requests)
    return max(math.ceil(average / oversubscription), -(-largest // limits.page_size))


def compare(
    runs: Sequence[tuple[list[Request], Limits]], bounds: Sequence[Pair], costs: Costs, policies: dict[str, Policy]
) -> list[Result]:
    """The average over `runs`, whose `bounds` are given, of each policy: one run's differences are half chance."""
    results = []
    for name, policy in policies.items():
        outcomes = [Simulation(limits, costs, policy).run(requests) for requests, limits in runs]
        each = [judge(*run, outcome, costs) for run, outcome in zip(runs, outcomes, strict=True)]
        most = max(max(outcome.parks) for outcome in outcomes)
        of_bound = tuple(one.makespan_ms / least_ms for one, (least_ms, _) in zip(outcomes, bounds, strict=True))
        result = Result(name, most, *(mean(values) for values in zip(*each, strict=True)))
        results.append(replace(result, of_bound=of_bound))
    return results


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def comparison_table(results: Sequence[Result], references: Sequence[Result]) -> str:
    front = pareto_front(results)
    header = ("policy", "makespan s", "/ bound", "worst", "mean completion s", "p99 gap ms", "parks", "of one")
    rows = [
        (
            each.name, f"{each.makespan_s:.2f}", with_error(each.of_bound, 4), f"{max(each.of_bound):.4f}",
            f"{each.completion_s:.2f}", f"{each.gap_ms:.2f}", f"{each.num_parks:.1f}", str(each.most_parks),
            f"{each.moved:,.0f}", f"{each.fairness:.4f}",
            "yes" if each in front else "-" if each in references else "no",
        )
        for each in (*results, *references)
    ]  # fmt: skip
    return table((*header, "tokens moved", "fairness", "front"), rows)


def with_error(values: Sequence[float], num_digits: int) -> str:
    """The mean, and its standard error where there is one."""
    error = f" ± {standard_error(values):.{num_digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{num_digits}f}{error}"


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def small_table(multiples: dict[str, list[Multiples]]) -> str:
    header = ("policy", "makespan / known", "worst", "/ unknown", "completion / known", "worst", "/ unknown")
    rows = []
    for name, each in multiples.items():
        cells = [name]
        for kind in (0, 1):
            known, unknown = [one.of_known[kind] for one in each], [one.of_unknown[kind] for one in each]
            cells += [f"{mean(known):.3f}", f"{max(known):.3f}", f"{mean(unknown):.3f}"]
        rows.append(cells)
    return table(header, rows)


def drawing(results: Sequence[Result]) -> str:
    columns = (
        ("makespan, s", [each.makespan_s for each in results], ".1f"),
        ("completion, s", [each.completion_s for each in results], ".1f"),
        ("p99 gap, ms", [each.gap_ms for each in results], ".1f"),
        ("parks", [each.num_parks for each in results], ".0f"),
        ("tokens moved", [each.moved for each in results], ",.0f"),
        ("-fairness", [-each.fairness for each in results], ".3f"),
    )
    return draw([each.name for each in results], columns, [each.name for each in pareto_front(results)])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.policy_sim", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, help="a CSV or JSON-lines trace; requests are drawn when none is given")
    parser.add_argument("--requests", type=int, default=1000, help="how many of them in a run (1000)")
    parser.add_argument("--runs", type=int, default=4, help="stretches of the trace, or draws, to average over (4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--oversubscription", type=float, default=1.5)
    parser.add_argument(
        "--small", type=int, default=20, metavar="COUNT", help="small instances beside their optimum (20)"
    )
    parser.add_argument(
        "--when-full", action="store_true", help="beside them, what is possible to who parks only when the pool is full"
    )
    parser.add_argument("--output", type=Path, help="write the tables there as well")
    parser.add_argument("--draw", type=Path, help="an SVG of the first table")
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


def report(options: argparse.Namespace, command: str) -> tuple[str, str]:
    """The tables and the drawing."""
    costs = Costs(options.step_ms, options.row_ms, options.token_ms, options.copy_gb_s)
    runs = [limited(requests, options, costs) for requests in request_lists(options)]
    bounds = [bound(requests, costs, limits) for requests, limits in runs]
    results, references = (compare(runs, bounds, costs, policies) for policies in (POLICIES, REFERENCES))
    where = options.trace.name if options.trace else f"drawn with seeds from {options.seed} on"
    is_on_front = SHIPPED in (each.name for each in pareto_front(results))
    sizes = sorted(limits.num_pages for _, limits in runs)
    pools = f"{sizes[0]} to {sizes[-1]}" if len(runs) > 1 else str(sizes[0])
    text = f"""# Policies

`python -m tools.policy_sim {command}`

The average of {len(runs)} runs of {options.requests} requests each ({where}) through the real ledger in simulated time.
Pools of {pools} pages of 16 cells: what the requests hold on average without a limit, divided by
{options.oversubscription}. {options.slots} slots, {costs.step_ms} ms a step, {costs.row_ms} ms a row,
{costs.token_ms} ms a prompt token, copies at {costs.copy_gb_s} GB/s.

{comparison_table(results, references)}

Front: a policy is on it unless another is no worse in all six columns (makespan, mean completion, p99 gap, parks,
tokens moved, fairness) and better in one; the averages are compared as they are, with no margin and no test for chance.
The shipped policy is {"" if is_on_front else "not "}on the Pareto front. "Of one": the most parks of one request in any
run; not judged. The last row is no policy that a server could have, and stands beside the front.

{bound_report(results[0], references[0], bounds)}"""
    if options.small:
        text += small_report(options, scaled_costs(costs))
    return text, drawing(results)


def bound_report(shipped: Result, clairvoyant: Result, bounds: Sequence[Pair]) -> str:
    makespan_s, completion_s = (mean(values) / 1e3 for values in zip(*bounds, strict=True))
    num_above = sum(each > TARGETS[0] for each in shipped.of_bound)
    return f"""The bound: on average over these runs, no schedule has a makespan below {makespan_s:.2f} s or a mean
completion below {completion_s:.2f} s, be it one that knows every arrival and every length in advance. It is given the
machine (the costs, the pages of the pool, how many a sequence takes) and more: any part of a step can be worked on at
any time, and parks and restores cost nothing. "/ bound": each run's makespan as a multiple of that run's bound, their
mean with its standard error, and the worst of them. The shipped policy is at {with_error(shipped.of_bound, 4)} times
the bound on the makespan (the target is {TARGETS[0]}; {num_above} of {len(bounds)} runs are above it, the worst at
{max(shipped.of_bound):.4f}) and at {shipped.completion_s / completion_s:.2f} times that on the mean completion. The
same server, if it knew every answer and served the least work first, would be at
{clairvoyant.completion_s / completion_s:.2f} times that on the mean completion.
"""


def small_report(options: argparse.Namespace, costs: Costs) -> str:
    numbers = range(options.small)
    smalls = [instance(each, costs, options.oversubscription, is_when_full=options.when_full) for each in numbers]
    multiples = ratios(smalls, costs, POLICIES | REFERENCES)
    best = multiples[BEST_ONLINE]
    (best_span, best_completion, _, _), (span, completion, span_online, completion_online) = (
        averages(multiples[name]) for name in (BEST_ONLINE, SHIPPED)
    )
    return f"""
{options.small} small instances of {len(smalls[0].prompts)} requests at once, {len(smalls[0].draws)} draws of the
answers for each, as multiples of the exact optimum by search over all states (a step, a cell and a token stand for
{SCALE}). "Known": the optimum for those very answers, known in advance. "Unknown": the optimum in expectation for one
that knows the prompts and the distribution of the answers, and learns that an answer ends when it ends. Both park and
restore in no time between any two steps. Makespan and completion each have an optimum of their own, which one schedule
need not reach together. "Worst": of the instances.

{small_table(multiples)}

The targets are {TARGETS[0]} times the makespan and {TARGETS[1]} times the mean completion of the known optimum. On
average over these instances no policy that does not know the answers gets below {best_span:.3f} and
{best_completion:.3f} (standard errors {error(best, 0):.3f} and {error(best, 1):.3f}, draws and instances): the first
target is {_reach(best_span, TARGETS[0])}, the second {_reach(best_completion, TARGETS[1])}.
The shipped policy is at {span:.3f} and {completion:.3f}; of the best that is possible without knowing, it is at
{span_online:.3f} and {completion_online:.3f} times.
{when_full_report(multiples) if options.when_full else ""}"""


def when_full_report(multiples: dict[str, list[Multiples]]) -> str:
    """Which parts the shipped policy's distance from the known optimum has."""
    unknown, when_full, shipped = (
        [each.of_known[0] for each in multiples[name]] for name in (BEST_ONLINE, BEST_WHEN_FULL, SHIPPED)
    )
    kept = [one / other for one, other in zip(when_full, unknown, strict=True)]
    rest = [one / other for one, other in zip(shipped, when_full, strict=True)]
    return f"""
Who parks only when those who run do not fit gives up what could be won by parking without need, so that all advance
side by side. The shipped policy's makespan is the product of three: not knowing the answers
({with_error(unknown, 3)}), parking only when full ({with_error(kept, 3)}), and the rest, which is whom to admit and to
park, and when, what the copies cost, and turns ({with_error(rest, 3)}).
"""


def averages(multiples: Sequence[Multiples]) -> tuple[float, float, float, float]:
    """Makespan and completion as multiples of the known optimum, then of the unknown one."""
    pairs = [(*each.of_known, *each.of_unknown) for each in multiples]
    span, completion, span_online, completion_online = (mean(values) for values in zip(*pairs, strict=True))
    return span, completion, span_online, completion_online


def error(multiples: Sequence[Multiples], kind: int) -> float:
    """Standard error of the average multiple of the known optimum."""
    return standard_error([each.of_known[kind] for each in multiples])


def _reach(best: float, target: float) -> str:
    return "out of reach for any of them" if best > target else "within reach of the best of them"


def notes(path: Path) -> str:
    """What was written by hand in the report that is there: all from its first heading below the title on."""
    _, heading, rest = path.read_text().partition("\n## ") if path.exists() else ("", "", "")
    return heading + rest


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    command = " ".join(each.rsplit("/", 1)[-1] if each[0] == "/" else each for each in arguments)
    text, picture = report(options, command)
    print(text)
    if options.output is not None:
        options.output.write_text(text + notes(options.output))
    if options.draw is not None:
        options.draw.write_text(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
