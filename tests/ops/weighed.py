"""Steps whose logits are changed by biases, penalties and bans before tokens are picked: in the program, and after it.

What the sampler makes of the logits that `run` gives is the oracle; for the program the tokens of all steps but the
first are unknown when they are started.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyserve.ops import Program, StepBatch
from pyserve.sampler import SampleRequest, sample
from pyserve.slot_sampling import SlotSampling
from pyserve.types import SamplingParams
from tests.ops.paged import ints

# Three tokens that are far more probable than all others, so that what was just picked is often picked again.
LIKELY = ((5, 30.0), (6, 29.8), (7, 29.6))
PARAMS = (
    SamplingParams(temperature=0.0, logit_bias=LIKELY, frequency_penalty=6.0, repeat_last_n=-1),
    SamplingParams(temperature=0.9, top_k=0, top_p=1.0, min_p=0.0, seed=4, repeat_penalty=1.7, presence_penalty=0.3),
    SamplingParams(temperature=0.0, logit_bias=LIKELY, repeat_penalty=1.5, repeat_last_n=2, banned_until=((6, 99),)),
    SamplingParams(temperature=1.2, top_k=20, seed=9, logit_bias=((3, float("-inf")), (5, 2.0)), min_p=0.01),
    SamplingParams(temperature=0.0, logit_bias=LIKELY, presence_penalty=15.0, repeat_last_n=1),
    SamplingParams(temperature=0.0, repeat_penalty=2.0, repeat_last_n=0),
)


def prompts(num_rows: int = len(PARAMS)) -> list[list[int]]:
    return [[10 + row, 5, 20 + row][: 1 + row % 3] for row in range(num_rows)]


def step(tokens: Sequence[Sequence[int]], page_table: torch.Tensor, num_tokens: int) -> StepBatch:
    """Of each row what is behind its first `num_tokens` of it; its last token is sampled."""
    rows = [(token, at, row) for row, each in enumerate(tokens) for at, token in enumerate(each) if at >= num_tokens]
    last = [i for i, (_, at, row) in enumerate(rows) if at == len(tokens[row]) - 1]
    columns = [ints(list(column)) for column in zip(*rows, strict=True)]
    return StepBatch(*columns, page_table, ints(last))


def picked_by_the_program(
    program: Program, kv: torch.Tensor, page_table: torch.Tensor, num_steps: int
) -> list[list[int]]:
    """`num_steps` tokens of each row: one step, and each other one behind it, started before the tokens before it are
    known. Each row sits out now and then; its next token is known when it comes back.
    """
    tokens, num_rows = prompts(), len(PARAMS)
    slots = SlotSampling(num_rows)
    for slot, params in enumerate(PARAMS):
        slots.set(slot, SampleRequest(params, tokens[slot], len(tokens[slot])))
    picked: list[list[int]] = [[] for _ in PARAMS]
    before: list[int] = []  # the rows of the step that is not collected yet

    def collect() -> None:
        for row, token in zip(before, program.collect().tolist(), strict=True):
            tokens[row].append(token)
            picked[row].append(token)

    for number in range(2 * num_steps):
        rows = [row for row in range(num_rows) if not number or (number + row) % 4]
        lens = [len(tokens[row]) + (row in before) for row in rows]
        sampling = slots.take(rows, lens)
        if number == 0:
            batch, sources = step(tokens, page_table, 0), None
        else:
            sources = ints([before.index(row) if row in before else -1 for row in rows])
            known = ints([0 if row in before else tokens[row][-1] for row in rows])
            places = ints(list(range(len(rows))))
            batch = StepBatch(known, ints([length - 1 for length in lens]), ints(rows), page_table, places)
        weighing = sampling.weighing(program.vocab_size, follows=sources is not None)
        assert weighing is not None
        bans = sampling.bans(program.vocab_size)
        program.start(batch, kv, sampling.real, sampling.whole, bans, sources, weighing)
        if number > 0:
            collect()
        before = rows
    collect()
    return [list(column) for column in zip(*(each[:num_steps] for each in picked), strict=True)]


def picked_by_the_sampler(
    program: Program, kv: torch.Tensor, page_table: torch.Tensor, num_steps: int
) -> list[list[int]]:
    tokens, picked = prompts(), []
    requests = [SampleRequest(params, each, len(each)) for params, each in zip(PARAMS, tokens, strict=True)]
    batch = step(tokens, page_table, 0)
    for _ in range(num_steps):
        sampled = sample(program.run(batch, kv).clone(), requests, program.sample)
        picked.append([each.token for each in sampled])
        for each, token in zip(tokens, picked[-1], strict=True):
            each.append(token)
        lens = [len(each) for each in tokens]
        places = ints(list(range(len(PARAMS))))
        batch = StepBatch(ints(picked[-1]), ints([length - 1 for length in lens]), places, page_table, places)
    return picked


def check_picked(picked: list[list[int]], wanted: list[list[int]]) -> None:
    """Every row by itself, and the case is worth looking at: penalties turn rows with likely tokens to others."""
    for row, columns in enumerate(zip(zip(*picked, strict=True), zip(*wanted, strict=True), strict=True)):
        assert columns[0] == columns[1], PARAMS[row]
        is_likely = PARAMS[row].logit_bias == LIKELY
        assert not is_likely or len(set(columns[1]) & {5, 6, 7}) > 1
