"""How many pieces the pages of a parked sequence are in: `python -m bench.fragmentation`.

Drives the real ledger without a model: 2 to 64 sequences grow side by side to 2,000 tokens each. Counts, for each that
arrives there, the runs of adjacent pages that it is in and the copy operations that a park of it takes, one for each
comb. "before" is the same ledger on a pool that hands out free pages last in, first out, as a plain free list does,
and evicts them one by one.

together   all begin at once with prompts of 1,000 tokens, and generate 1,000
turnover   prompts of 100 to 1,900 tokens; whoever has 2,000 leaves, its pages stay in the prompt cache, another comes
pressure   the same in a pool for a third of it, so that sequences are parked and come back
at once    pressure with --no-preempt-async, where parks land at once and no runway is needed: the pool of 16-token
           pages fills to its last one; smaller pages keep the runway all the same, since without it sequences take each
           other's last blocks apart

Columns: means of runs and copies over the sequences, and the most copies that one of them takes. In whole blocks of 16
tokens, which is what a sequence gets as long as there are any, 2,000 tokens are 125 runs at most, and as many of these
are single blocks, two of which are a comb wherever they lie. `bench.worst_park` looks for worse mixes than these.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyserve.ledger
from pyserve.ledger import Ledger
from pyserve.page_runs import combs, runs
from pyserve.plan import Limits
from pyserve.pool import Pool
from pyserve.sequence import Sequence
from pyserve.types import SamplingParams, SequenceRequest

LENGTH = 2000  # tokens of a sequence when it is looked at
MIXES = ("together", "turnover", "pressure", "at once")
NUM_SEQUENCES = (2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64)
PAGE_SIZES = (1, 4, 16)
LARGE = 1 << 30


class LastInFirstOut(Pool):
    """The plain allocator: a stack of free pages."""

    def __init__(self, num_pages: int, block_len: int = 1) -> None:
        super().__init__(num_pages)
        self._stack = list(range(num_pages - 1, -1, -1))

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        del after
        pages = [self._stack.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        self.num_free -= count
        return pages

    def _free(self, start: int, length: int) -> None:
        self.num_free += length
        self._stack += range(start, start + length)


@dataclass(slots=True)
class Pieces:
    """Of every sequence that was looked at."""

    runs: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)

    def look_at(self, pages: list[int]) -> None:
        found = runs(pages)
        self.runs.append(len(found))
        self.copies.append(len(combs(found)))


def measure(mix: str, num_sequences: int, page_size: int, pool: type[Pool] | None = None, seed: int = 1) -> Pieces:
    """One mix on one pool; pyserve's own where none is named."""
    source = random.Random(seed)
    demand = num_sequences * (LENGTH + 32)
    num_cells = demand if mix in ("together", "turnover") else max(demand // 3, LENGTH + 32)
    limits = Limits(num_cells // page_size + num_sequences, page_size, num_sequences, is_async=mix != "at once")
    ledger = Ledger(limits) if pool is None else _plain_ledger(pool, limits)
    num_wanted = num_sequences * (1 if mix == "together" else 4)
    prompt_lens = [1000 if mix == "together" else source.randrange(100, 1900) for _ in range(num_wanted)]
    ledger.submit([_sequence(id, prompt_len, source) for id, prompt_len in enumerate(prompt_lens)])
    pieces = Pieces()
    now_ms = 0.0
    while not ledger.is_idle:
        now_ms += 10.0
        _step(ledger, now_ms, source)
        for sequence in ledger.running():
            if len(sequence.tokens) >= LENGTH:
                pieces.look_at(sequence.pages[: -(-LENGTH // page_size)])
                ledger.finish(sequence, now_ms)
    return pieces


def _plain_ledger(pool: type[Pool], limits: Limits) -> Ledger:
    usual = pyserve.ledger.Pool
    pyserve.ledger.Pool = pool  # type: ignore[misc]
    try:
        ledger = Ledger(limits)
    finally:
        pyserve.ledger.Pool = usual  # type: ignore[misc]
    ledger._residents.evicted_ahead = 0
    return ledger


def _sequence(id: int, prompt_len: int, source: random.Random) -> Sequence:
    prompt = tuple(source.randrange(1000) for _ in range(prompt_len))
    return Sequence(id, SequenceRequest(prompt, SamplingParams(), max_tokens=LENGTH), id)


def _step(ledger: Ledger, now_ms: float, source: random.Random) -> None:
    """One iteration in which every copy lands at once."""
    plan = ledger.apply(ledger.plan(now_ms, LARGE), now_ms)
    for sequence in ledger.preempting():
        ledger.park_landed(sequence)
    for sequence in ledger.restoring():
        ledger.restore_landed(sequence)
    ledger.step_done(plan.rows, [source.randrange(1000) for row in plan.rows if row.samples])


def table(page_sizes: Iterable[int] = PAGE_SIZES) -> str:
    """Markdown."""
    lines = [
        "| page size | mix | sequences | runs before | copies before | most | runs | copies | most |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for page_size in page_sizes:
        for mix in MIXES:
            for count in NUM_SEQUENCES:
                plain = measure(mix, count, page_size, LastInFirstOut)
                ours = measure(mix, count, page_size)
                lines.append(f"| {page_size} | {mix} | {count} | {_row(plain)} | {_row(ours)} |")
    return "\n".join(lines) + "\n"


def _row(pieces: Pieces) -> str:
    means = f"{statistics.mean(pieces.runs):.1f} | {statistics.mean(pieces.copies):.1f}"
    return f"{means} | {max(pieces.copies)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the table here, too")
    chosen = parser.parse_args()
    text = table()
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(f"{__doc__}\n{text}")


if __name__ == "__main__":
    main()
