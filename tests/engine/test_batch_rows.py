"""A batch with any of its rows taken out is the same batch for the rows that stay (R25): no index moves apart."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from pyserve.kv_store import KvStore
from pyserve.ops import Program
from pyserve.plan import Row, Rows
from pyserve.runner import Runner, Step
from pyserve.sequence import Sequence
from pyserve.types import SamplingParams, SequenceRequest

NUM_BATCHES = 20_000
NUM_SLOTS = 6
PAGE_SIZE = 4
WIDTH = 64  # pages that a sequence may have
MAX_TOKENS = 48  # of a sequence
CHUNK = 9


def new_sequence(dice: random.Random, number: int, slot: int) -> Sequence:
    """Half computed its prompt; some have their prompt scored. Every token is another one."""
    prompt_len = dice.randrange(1, MAX_TOKENS // 2)
    prompt = tuple(range(number * MAX_TOKENS, number * MAX_TOKENS + prompt_len))
    scored = 2 if dice.random() < 0.3 else None
    sampling = SamplingParams(
        temperature=number % 3 / 2, top_k=number % 50, top_p=0.5 + number % 5 / 10, min_p=number % 7 / 10, seed=number,
        repeat_penalty=dice.choice([1.0, 1.0, 1.0, 1.1]), num_logprobs=dice.choice([None, None, None, 0]),
        banned_until=dice.choice([(), (), ((2, 9),)]),
    )  # fmt: skip
    sequence = Sequence(number, SequenceRequest(prompt, sampling, prompt_logprobs=scored), 0)
    sequence.slot = slot
    for _ in range(dice.randrange(8) if dice.random() < 0.5 else 0):
        add_token(sequence)
    add_pages(dice, sequence)
    return sequence


def add_token(sequence: Sequence) -> None:
    sequence.tokens.append(sequence.id * MAX_TOKENS + len(sequence.tokens))


def add_pages(dice: random.Random, sequence: Sequence) -> None:
    while len(sequence.pages) * PAGE_SIZE < len(sequence.tokens):
        sequence.pages.append(dice.randrange(10_000))


def change(dice: random.Random, residents: list[Sequence], number: int) -> None:
    """What happens between two steps: one is followed by another, one was parked and restored, one has grown."""
    slot = dice.randrange(NUM_SLOTS)
    sequence = residents[slot]
    kind = dice.random()
    if kind < 0.2 or len(sequence.tokens) == MAX_TOKENS:
        residents[slot] = new_sequence(dice, number, slot)
    elif kind < 0.4:
        sequence.pages = []
        add_pages(dice, sequence)
    else:
        add_token(sequence)
        add_pages(dice, sequence)


def random_rows(dice: random.Random, residents: list[Sequence]) -> list[Row]:
    """A row of some of the sequences, in any order: one token, or a chunk that ends at the last token or before."""
    rows = []
    for sequence in dice.sample(residents, dice.randint(1, NUM_SLOTS)):
        start = max(0, len(sequence.tokens) - dice.randint(1, CHUNK))
        length = dice.randint(1, len(sequence.tokens) - start)
        rows.append(Row(sequence, start, length, start + length == len(sequence.tokens)))
    return rows


def columns(rows: Items[Row]) -> Rows:
    gathered = Rows()
    for row in rows:
        gathered.add(*row)
    return gathered


def firsts(rows: Items[Row]) -> list[int]:
    """Where each row's tokens begin in the batch."""
    at = [0]
    for row in rows:
        at.append(at[-1] + row.length)
    return at


def check_rows(step: Step, rows: Items[Row]) -> None:
    """Every row has its own tokens, positions, slot, pages, request, and the logits of its own last token."""
    tokens, positions = step.batch.tokens.tolist(), step.batch.positions.tolist()
    slots, sample_rows = step.batch.sequences.tolist(), step.batch.sample_rows.tolist()
    table = step.batch.page_table.numpy()
    tables = zip(step.ids, step.sampling.real.tolist(), step.sampling.whole.tolist(), step.sample_at, strict=True)
    sampling = iter(tables)
    requests = iter(step.sampling.requests)
    is_plain = True
    scored = iter(step.scored)
    first = 0
    for sequence, start, length, samples in rows:
        last = first + length
        assert tokens[first:last] == sequence.tokens[start : start + length]
        assert positions[first:last] == list(range(start, start + length))
        assert slots[first:last] == [sequence.slot] * length
        assert table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages
        if samples:
            id, real, whole, at = next(sampling)
            params = sequence.request.sampling
            assert id == sequence.id and sample_rows[at] == last - 1
            assert real == pytest.approx([params.temperature, params.top_p, params.min_p])
            assert whole == [params.top_k, params.seed, start + length]
            is_plain = is_plain and params.num_logprobs is None
            if step.sampling.requests:
                request = next(requests)
                assert request.tokens is sequence.tokens and request.params is params
                assert request.prompt_len == sequence.prompt_len
            else:
                assert params.repeat_penalty == 1.0 and not params.banned_until
        if sequence.request.prompt_logprobs is not None and start < sequence.prompt_len - 1:
            row, at = next(scored)
            assert row.sequence is sequence
            assert sample_rows[at : at + length] == list(range(first, last))
        first = last
    assert first == len(tokens) == len(positions) == len(slots)
    assert next(sampling, None) is None and next(scored, None) is None and next(requests, None) is None
    assert step.sampling.is_plain == is_plain


def check_same_map(whole: Step, narrowed: Step, rows: Items[Row], kept: Items[int]) -> None:
    """`narrowed` is `whole` with one and the same index map applied to every array of it."""
    at = firsts(rows)
    old = [index for row in kept for index in range(at[row], at[row + 1])]  # new index -> old index
    new = {index: place for place, index in enumerate(old)}
    for before, after in (
        (whole.batch.tokens, narrowed.batch.tokens),
        (whole.batch.positions, narrowed.batch.positions),
        (whole.batch.sequences, narrowed.batch.sequences),
    ):
        values = before.tolist()
        assert after.tolist() == [values[index] for index in old]
    wanted = [index for index in whole.batch.sample_rows.tolist() if index in new]
    assert narrowed.batch.sample_rows.tolist() == [new[index] for index in wanted]
    ids = {rows[row].sequence.id for row in kept}
    places = [place for place, id in enumerate(whole.ids) if id in ids]
    assert narrowed.ids == [whole.ids[place] for place in places]
    for before, after in (
        (whole.sampling.real, narrowed.sampling.real),
        (whole.sampling.whole, narrowed.sampling.whole),
    ):
        assert torch.equal(before[places], after)


def test_rows_that_stay_are_the_same_whichever_rows_go() -> None:
    dice = random.Random(1)
    runner = Runner(cast(Program, None), cast(KvStore, None), num_slots=NUM_SLOTS, pages_per_sequence=WIDTH)
    residents = [new_sequence(dice, slot, slot) for slot in range(NUM_SLOTS)]
    num_narrowed = num_scored = 0
    for number in range(NUM_BATCHES):
        change(dice, residents, NUM_SLOTS + number)
        rows = random_rows(dice, residents)
        kept = sorted(dice.sample(range(len(rows)), dice.randint(0, len(rows))))
        whole = runner.prepare(columns(rows))
        narrowed = runner.prepare(columns([rows[row] for row in kept]))
        check_rows(whole, rows)
        check_rows(narrowed, [rows[row] for row in kept])
        check_same_map(whole, narrowed, rows, kept)
        num_narrowed += 0 < len(kept) < len(rows)
        num_scored += len(narrowed.scored)
    assert num_narrowed > NUM_BATCHES // 3 and num_scored > NUM_BATCHES // 10, "the batches were worth looking at"


def test_a_step_of_the_same_rows_is_what_it_would_be_if_it_were_made_anew() -> None:
    """With new pages for whoever enters one, reserved long before or allocated just now."""
    dice = random.Random(2)
    num_entered = 0
    for _ in range(300):
        kv = cast(KvStore, SimpleNamespace(page_size=PAGE_SIZE))
        runners = [Runner(cast(Program, None), kv, num_slots=NUM_SLOTS, pages_per_sequence=WIDTH) for _ in range(2)]
        residents = [new_sequence(dice, slot, slot) for slot in range(NUM_SLOTS)]
        rows = Rows(dice.sample(residents, dice.randint(1, NUM_SLOTS)))
        rows = columns([Row(each, len(each.tokens) - 1, 1, True) for each in rows.sequences])
        repeated, anew = (runner.prepare(rows) for runner in runners)
        for _ in range(dice.randrange(1, 3 * PAGE_SIZE)):
            for each in residents:
                add_token(each)
                add_pages(dice, each)
            num_entered += sum(len(each.tokens) % PAGE_SIZE == 1 for each in rows.sequences)
            repeated = runners[0].repeat(repeated)
            anew = runners[1].prepare_next(anew.rows.behind(), [*range(len(rows))])
            assert_same_step(repeated, anew, rows.sequences)
    assert num_entered > 1000


def assert_same_step(one: Step, other: Step, sequences: Items[Sequence]) -> None:
    assert one.rows == other.rows and one.ids == other.ids and one.sample_at == other.sample_at
    for name in ("positions", "sequences", "sample_rows"):
        assert torch.equal(getattr(one.batch, name), getattr(other.batch, name)), name
    assert one.sources is not None and other.sources is not None and torch.equal(one.sources, other.sources)
    for each in sequences:
        num_pages = -(-len(each.tokens) // PAGE_SIZE)
        assert one.batch.page_table[each.slot, :num_pages].tolist() == each.pages[:num_pages]
    assert torch.equal(one.sampling.real, other.sampling.real) and torch.equal(one.sampling.whole, other.sampling.whole)
    assert [each.params for each in one.sampling.requests] == [each.params for each in other.sampling.requests]
