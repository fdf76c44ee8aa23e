"""A night of requests through the real ledger in simulated time: none lost, none ended by pressure, nothing stuck.

    python -m tools.liveness_nightly --jobs 8           # 10^6 requests and every small world
    python -m tools.liveness_nightly --requests 20000 --no-small-worlds --progress progress.txt

Half of the requests have the shape of Azure's conversations, on a pool of two thirds of what they hold on average: none
of them may be parked more than four times. The other half come to pools, tiers and modes drawn at random. The ledger
checks its integrity now and then on the way. A thousand requests take one to three seconds of a core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from pyserve.ledger import Limits
from tests.pure.test_small_worlds import WORLDS, explore, limits_of
from tools.policy_sim import pool_pages
from tools.simulation import Costs, Request, Simulation, conversations, take

BATCH = 1000  # requests
MAX_PARKS = 4  # of one request, at 1.5 times the pool
OVERSUBSCRIPTION = 1.5
NUM_SLOTS = 64


def azure_shaped(seed: int, num_pages: int, requests: list[Request]) -> Counter[int]:
    limits = Limits(num_pages, 16, NUM_SLOTS, 2048, max_queue=BATCH)
    outcome = Simulation(limits, Costs(), check_every=997).run(requests)
    parks = Counter(outcome.parks)
    assert max(parks) <= MAX_PARKS, f"seed {seed}: a request was parked {max(parks)} times"
    return parks


def anything(seed: int) -> Counter[int]:
    dice = random.Random(seed)
    scale = dice.choice([1, 4, 16])
    requests = [
        Request(each.arrival_ms, each.prompt_len // scale + 1, each.answer_len // scale + 1)
        for each in take(conversations(seed, rate=dice.choice([1.0, 5.5, 50.0])), BATCH)
    ]
    page_size = dice.choice([1, 16, 64] if scale > 1 else [16, 64])
    limits = Limits(
        num_pages=dice.randint(8000, 40_000) // scale // page_size,
        page_size=page_size,
        num_slots=dice.choice([4, 16, 64]),
        batch_tokens=dice.choice([64, 512, 2048]),
        runway_steps=dice.choice([0, 8, 8]),
        rotation_delay_ms=dice.choice([0.0, 100.0, 2000.0]),
        is_planner_on=dice.random() < 0.8,
        preempt_every=dice.choice([0, 0, 64]),
        max_queue=BATCH,
    )
    costs = Costs(copy_gb_s=dice.choice([0.2, 2.0, 20.0]))
    host_pages = dice.choice([0, limits.num_pages // 2, 1 << 30])
    return Counter(Simulation(limits, costs, host_pages=host_pages, check_every=997).run(requests).parks)


def batch(seed: int, num_pages: int) -> tuple[str, Counter[int]]:
    """Even seeds come in Azure's shape to a pool of `num_pages`. Returns the kind, and requests by number of parks."""
    if seed % 2:
        return "anything", anything(seed)
    return "azure", azure_shaped(seed, num_pages, take(conversations(seed), BATCH))


def batches(num_requests: int, first_seed: int, jobs: int) -> Iterator[tuple[str, Counter[int]]]:
    """The batches as they end. The first that fails ends them all."""
    sample = take(conversations(0), BATCH)
    num_pages = pool_pages(sample, Limits(1, 16, NUM_SLOTS, 2048), Costs(), OVERSUBSCRIPTION)
    seeds = range(first_seed, first_seed + num_requests // BATCH)
    if jobs == 1:
        yield from (batch(seed, num_pages) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(batch, seed, num_pages) for seed in seeds]):
            yield done.result()


def report(totals: dict[str, Counter[int]], started_s: float) -> str:
    lines = []
    for kind, parks in totals.items():
        num_parks = sum(count * number for count, number in parks.items())
        most, histogram = max(parks, default=0), dict(sorted(parks.items()))
        lines.append(f"{kind}: {parks.total()} requests, {num_parks} parks, at most {most} of one: {histogram}\n")
    return "".join(lines) + f"all of these ended, in {time.monotonic() - started_s:.0f} s\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.liveness_nightly", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help=f"a multiple of {2 * BATCH} (1000000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--progress", type=Path, help="a file that always says what has been done so far")
    parser.add_argument("--small-worlds", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    started_s = time.monotonic()
    totals: dict[str, Counter[int]] = {"azure": Counter(), "anything": Counter()}
    for kind, parks in batches(options.requests, options.seed, options.jobs):
        totals[kind] += parks
        if options.progress is not None:
            options.progress.write_text(report(totals, started_s))
    print(report(totals, started_s), end="")
    if options.small_worlds:
        for name, (host_pages, changes) in WORLDS.items():
            print(f"small worlds, {name}: {explore(limits_of(changes), host_pages, depth=1000)}")


if __name__ == "__main__":
    main()
