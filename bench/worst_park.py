"""Looks for the mix in which a park of 2,000 tokens takes the most copies: `python -m bench.worst_park --worlds 100`.

Each world is drawn at random and drives the real ledger without a model: 2 to 64 slots, pages of 1 to 16 tokens, a pool
for two sequences of 2,000 tokens up to one for all of them, prompts alone, in groups of the same prompt, behind a
common beginning, and behind all that another had in the end, as the turns of a chat; hang-ups; copies that land at
once, or after some steps and in any order. Counted are the copies of every park, of at most its first 2,000 tokens, and
of every sequence when it has 2,000. Printed are the worlds that are worse than all before, then a table of the most
copies by page size and number of slots. `--seed N` runs one world again.

`--landing S` has each copy land with that chance in each step, in all worlds. Where copies take longer than the runway
of 8 steps, the pool fills to its last page meanwhile, and whoever grows takes single pages where nothing else is left:
then more than 80 copies cannot be helped. The fewest pages that were to be had at any time
are printed, too.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count, islice

from pyserve.ledger import Ledger
from pyserve.page_runs import combs, runs
from pyserve.plan import Limits, Plan
from pyserve.sequence import Sequence, State, make_group
from pyserve.types import SamplingParams, SequenceRequest

LENGTH = 2000
MOST_TOKENS = 2300  # of any sequence
PAGE_SIZES = (1, 2, 4, 8, 16)
NUM_SLOTS = (2, 3, 5, 8, 12, 16, 17, 24, 32, 48, 64)
ROOM = 1 << 30


@dataclass(frozen=True, slots=True)
class World:
    """What is drawn. Shares are chances."""

    limits: Limits
    num_requests: int
    shortest: int  # prompt tokens
    long_share: float  # of the answers: up to `MOST_TOKENS` in all
    group_share: float
    common_share: float
    turn_share: float
    hang_up_share: float  # for each sequence and step
    landing_share: float  # for each copy and step


def draw(dice: random.Random) -> World:
    num_slots, page_size = dice.choice(NUM_SLOTS), dice.choice(PAGE_SIZES)
    fewest = MOST_TOKENS + 64
    num_cells = round(fewest * (num_slots * MOST_TOKENS / fewest) ** dice.choice([dice.random(), 0.5, 0.75, 1.0]))
    limits = Limits(
        max(num_cells, fewest) // page_size,
        page_size,
        num_slots,
        batch_tokens=dice.choice([64, 512, 2048]),
        is_async=dice.random() < 0.7,
        rotation_delay_ms=dice.choice([200.0, 2000.0]),
        preempt_every=dice.choice([0, 0, 0, 0, 300]),
    )
    return World(
        limits,
        num_requests=3 * num_slots,
        shortest=dice.choice([1, 100, 1000]),
        long_share=dice.choice([0.2, 0.6, 1.0]),
        group_share=dice.choice([0.0, 0.0, 0.3]),
        common_share=dice.choice([0.0, 0.3, 0.9]),
        turn_share=dice.choice([0.0, 0.0, 0.5]),
        hang_up_share=dice.choice([0.0, 0.0, 0.001]),
        landing_share=dice.choice([1.0, 0.3, 0.1]),
    )


@dataclass(slots=True)
class Outcome:
    """Of one world."""

    copies: list[int] = field(default_factory=list)  # of each park, and of each sequence of 2,000 tokens
    num_parks: int = 0
    num_steps: int = 0
    fewest_free: int = 1 << 30  # pages, while somebody ran


class Walk:
    """One world from its first request to its last token."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self._world, self._dice = world, dice
        self._ledger = Ledger(world.limits)
        self._tokens = count()  # no two are the same, but in what prompts have in common
        self._common = tuple(islice(self._tokens, MOST_TOKENS))
        self._ended: list[Sequence] = []
        self._looked_at: set[int] = set()
        self._num_submitted = 0
        self._now_ms = 0.0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        while self._num_submitted < self._world.num_requests or not self._ledger.is_idle:
            if self._num_submitted < self._world.num_requests and not self._ledger.waiting:
                self._submit()
            self._iterate()
        return self.outcome

    def _prompt(self) -> tuple[int, ...]:
        dice, world = self._dice, self._world
        beginning: tuple[int, ...] = ()
        if self._ended and dice.random() < world.turn_share:
            beginning = tuple(dice.choice(self._ended[-world.limits.num_slots :]).tokens)
        elif dice.random() < world.common_share:
            beginning = self._common[: dice.choice([100, 777, 1500])]
        beginning = beginning[: MOST_TOKENS - 300]
        length = dice.randint(min(world.shortest, MOST_TOKENS - len(beginning) - 10), MOST_TOKENS - len(beginning) - 10)
        return beginning + tuple(islice(self._tokens, length))

    def _submit(self) -> None:
        dice, prompt = self._dice, self._prompt()
        is_group = dice.random() < self._world.group_share
        size = min(dice.choice([2, 4, 8]), self._world.limits.num_slots) if is_group else 1
        most = MOST_TOKENS - len(prompt)
        max_tokens = most if dice.random() < self._world.long_share else dice.randint(1, most)
        request = SequenceRequest(prompt, SamplingParams(), max_tokens=max_tokens)
        self._ledger.submit(make_group([request] * size, self._num_submitted, self._num_submitted))
        self._num_submitted += size

    def _iterate(self) -> None:
        ledger, dice = self._ledger, self._dice
        self._now_ms += 10.0
        for sequence in [*ledger.preempting(), *ledger.restoring(), *ledger.departing()]:
            if not self._world.limits.is_async or dice.random() < self._world.landing_share:
                land = {State.PREEMPTING: ledger.park_landed, State.RESTORING: ledger.restore_landed}
                land.get(sequence.state, ledger.copy_lost)(sequence)
        for sequence in ledger.live() if self._world.hang_up_share else ():
            if dice.random() < self._world.hang_up_share:
                self._end(sequence)
        plan = ledger.plan(self._now_ms, ROOM)
        self._count(plan)
        plan = ledger.apply(plan, self._now_ms)
        self.outcome.num_steps += 1
        self.outcome.fewest_free = min(self.outcome.fewest_free, ledger.free_pages + ledger.cached_pages)
        ledger.step_done(plan.rows, [next(self._tokens) for row in plan.rows if row.samples])
        for sequence in ledger.running():
            if len(sequence.tokens) >= LENGTH and sequence.id not in self._looked_at:
                self._looked_at.add(sequence.id)
                self._look_at(sequence)
            if sequence.num_generated >= (sequence.request.max_tokens or 0):
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._ended.append(sequence)
        self._ledger.finish(sequence, self._now_ms)

    def _count(self, plan: Plan) -> None:
        for park in plan.parks:
            self.outcome.num_parks += 1
            self._look_at(park.sequence)

    def _look_at(self, sequence: Sequence) -> None:
        num_pages = -(-min(LENGTH, sequence.num_computed) // self._world.limits.page_size)
        self.outcome.copies.append(len(combs(runs(sequence.pages[:num_pages]))))


def run(seed: int, landing_share: float | None = None) -> tuple[World, Outcome]:
    dice = random.Random(seed)
    world = draw(dice)
    if landing_share is not None:
        world = replace(world, landing_share=landing_share)
    return world, Walk(world, dice).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--landing", type=float, default=None, metavar="S")
    parser.add_argument("--seed", type=int, default=None, help="run this world alone")
    chosen = parser.parse_args()
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.worlds) if chosen.seed is None else [chosen.seed]
    worst, num_parks, num_looked_at = Counter[tuple[int, int]](), 0, 0
    for seed in seeds:
        world, outcome = run(seed, chosen.landing)
        num_parks += outcome.num_parks
        num_looked_at += len(outcome.copies)
        most = max(outcome.copies, default=0)
        if most > max(worst.values(), default=0) or chosen.seed is not None:
            print(
                f"seed {seed}: {most} copies at most, {outcome.num_parks} parks, {outcome.num_steps} steps, "
                f"{outcome.fewest_free} pages free at least\n  {world}",
                flush=True,
            )
        key = world.limits.page_size, world.limits.num_slots
        worst[key] = max(worst[key], most)
    print("| page size | " + " | ".join(map(str, NUM_SLOTS)) + " |\n|" + " --- |" * (len(NUM_SLOTS) + 1))
    for page_size in PAGE_SIZES:
        columns = [str(worst[page_size, num_slots] or "") for num_slots in NUM_SLOTS]
        print(f"| {page_size} | {' | '.join(columns)} |")
    print(f"{num_parks} parks, {num_looked_at} looked at")


if __name__ == "__main__":
    main()
