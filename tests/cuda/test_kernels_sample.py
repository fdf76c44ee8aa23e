"""Sampling on the device: the CPU sampler's tokens from the same logits, in any schedule and company (R37)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pyserve.ops import BROKEN_ROW
from pyserve.sampler import SampleRequest, sample
from pyserve.types import SamplingParams
from tests.cuda.build import IN_ORDER, POLICIES, REVERSE, EmulatorError, Library
from tests.cuda.row_cases import Array, normal
from tests.cuda.sample_cases import Draw, LogitChange, change_logits, draw, wanted_token

SETTINGS = (
    Draw(temperature=0.0),
    Draw(temperature=-1.0, top_k=3),
    Draw(),
    Draw(temperature=0.3),
    Draw(temperature=1.7, min_p=0.05),
    Draw(top_k=1),
    Draw(top_k=40),
    Draw(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    Draw(top_p=0.9533),
    Draw(temperature=2.5, top_p=0.3137),
    Draw(top_p=0.0),
    Draw(temperature=0.01, top_k=300, min_p=0.9),
    Draw(top_k=7, min_p=1.0),
    Draw(temperature=4.0, top_p=0.5, min_p=0.001),
)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library("sample.cu", "draw.cu")


def on_cpu(logits: Array, draws: list[Draw]) -> list[int]:
    return [
        torch.ops.pyserve.sample_row(
            torch.from_numpy(row), each.temperature, each.top_k, each.top_p, each.min_p, each.seed, each.position
        )
        for row, each in zip(logits, draws, strict=True)
    ]


def many(repeats: int) -> list[Draw]:
    """Every setting with other seeds and positions."""
    return [dataclasses.replace(each, seed=1000 * i + 7, position=13 * i) for i in range(repeats) for each in SETTINGS]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [0.4, 6.0])
def test_the_token_is_the_cpus(library: Library, size: float, policy: int) -> None:
    """Logits of a few distinct values, so that there are ties."""
    library.configure(policy)
    draws = many(1)
    logits = np.round(normal(1, len(draws), 700) * size * 8) / np.float32(8)
    assert draw(library, logits, draws).tolist() == on_cpu(logits, draws)


@pytest.mark.parametrize("draw_of_row", SETTINGS, ids=str)
def test_the_cpus_token_from_a_large_vocabulary(library: Library, draw_of_row: Draw) -> None:
    """10,000 tokens: nearly flat, where the candidates do not fit into shared memory, and steep."""
    library.configure(IN_ORDER)
    draws = [dataclasses.replace(draw_of_row, seed=seed, position=5) for seed in (11, 3, 2, 8)]
    logits = normal(2, 4, 10_000) * np.float32([[0.1], [0.5], [4.0], [8.0]])
    assert draw(library, logits, draws).tolist() == on_cpu(logits, draws)


def test_a_top_k_beyond_what_is_listed(library: Library) -> None:
    library.configure(IN_ORDER)
    draws = [Draw(top_k=5000, seed=seed) for seed in range(3)] + [Draw(top_k=5000, top_p=0.9, seed=9)]
    logits = normal(3, 4, 6000)
    assert draw(library, logits, draws).tolist() == on_cpu(logits, draws)


def test_it_is_the_references_token(library: Library) -> None:
    library.configure(IN_ORDER)
    draws = many(1)
    logits = normal(4, len(draws), 300) * 3
    wanted = [wanted_token(row, each) for row, each in zip(logits, draws, strict=True)]
    assert draw(library, logits, draws).tolist() == wanted


def test_a_row_is_the_same_alone_and_in_company(library: Library) -> None:
    draws, logits = many(1), normal(5, len(SETTINGS), 500)
    library.configure(IN_ORDER)
    together = draw(library, logits, draws)
    library.configure(REVERSE)
    for i, each in enumerate(draws):
        assert draw(library, logits[i : i + 1].copy(), [each]).tolist() == [together[i]]


def test_what_is_banned_is_never_picked(library: Library) -> None:
    """Nothing but a few tokens is left; where nothing is, there is no token."""
    draws = many(1)
    library.configure(IN_ORDER)
    logits = np.full((len(draws), 900), -np.inf, np.float32)
    assert draw(library, logits, draws).tolist() == [BROKEN_ROW] * len(draws)
    logits[:, [17, 18, 800]] = 1.0, 1.0, 0.5
    tokens = draw(library, logits, draws)
    assert {17, 18} <= set(tokens.tolist()) <= {17, 18, 800}
    assert tokens.tolist() == on_cpu(logits, draws)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 60, 99])
def test_a_broken_row_gives_no_token_and_the_others_theirs(library: Library, bad: float, place: int) -> None:
    library.configure(IN_ORDER)
    draws, logits = [*SETTINGS, *SETTINGS], normal(6, 2 * len(SETTINGS), 100)
    logits[: len(SETTINGS), place] = bad
    tokens = draw(library, logits, draws).tolist()
    assert tokens == [BROKEN_ROW] * len(SETTINGS) + on_cpu(logits[len(SETTINGS) :].copy(), list(SETTINGS))
    assert on_cpu(logits, draws) == tokens


def test_a_row_longer_than_its_vocabulary(library: Library) -> None:
    library.configure(IN_ORDER)
    logits = normal(7, len(SETTINGS), 40)
    logits[:, 33:] = 99
    assert draw(library, logits, many(1), 33).tolist() == on_cpu(logits[:, :33].copy(), many(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_bias_penalties_and_bans_are_the_cpus(library: Library, policy: int) -> None:
    """What the CPU's sampler does to a row, seen through what is most probable afterwards and how probable it is."""
    library.configure(policy)
    params = SamplingParams(
        temperature=0.0,
        logit_bias=((3, 2.5), (9, -1.0), (11, 0.25)),
        repeat_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repeat_last_n=-1,
        banned_until=((3, 99), (20, 99)),
        num_logprobs=5,
    )
    tokens = [9, 9, 30, 31, 9]
    on_host = torch.from_numpy(normal(8, 2, 60))
    first = on_host.clone().numpy()
    sample(on_host, [SampleRequest(params, tokens, 2), SampleRequest(params, tokens, 2)])
    changes = []
    biases, bans = dict(params.logit_bias), dict(params.banned_until)
    for row in (0, 1):
        for token in sorted({*biases, *bans, *tokens}):
            count, penalties = tokens.count(token), (1.3, 0.4, 0.2)
            changes.append(LogitChange(row, token, biases.get(token, 0.0), count, *penalties, token in bans))
    np.testing.assert_array_equal(change_logits(library, first, changes), on_host.numpy())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_token_before_counts_whether_or_not_it_is_among_the_changes(library: Library, policy: int) -> None:
    """Row 1 comes after the token 7, row 2 after 12; row 0 after none."""
    library.configure(policy)
    logits, penalties = normal(9, 3, 40), (1.3, 0.4, 0.2)
    known = [
        (0, 7, 0.5, 1.0),
        (1, 3, -0.5, 2.0),
        (1, 7, 1.0, 2.0),
        (1, 12, 0.25, 0.0),
        (2, 7, 0.5, 1.0),
        (2, 30, 2.0, 0.0),
    ]
    changes, wanted = [], []
    for row, source in ((0, None), (1, 1), (2, 0)):
        token = (12, 7)[source] if source is not None else None
        if source is not None:
            changes.append(LogitChange(row, -1 - source, 0.0, 1.0, *penalties))
        if source is not None and token not in [id for at, id, _, _ in known if at == row]:
            wanted.append(LogitChange(row, token, 0.0, 1.0, *penalties))
        for _, id, bias, count in [each for each in known if each[0] == row]:
            after = 0 if source is None else -1 - source
            changes.append(LogitChange(row, id, bias, count, *penalties, 0, after))
            wanted.append(LogitChange(row, id, bias, count + (id == token), *penalties))
    got = change_logits(library, logits, changes, np.array([12, 7], np.int32))
    np.testing.assert_array_equal(got, change_logits(library, logits, wanted))
    assert (got != logits).sum() == len(known) + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_behind_a_broken_row_no_token_before_counts(library: Library, policy: int) -> None:
    library.configure(policy)
    logits, penalties = normal(10, 3, 40), (1.3, 0.4, 0.2)
    changes = [
        LogitChange(1, -1, 0.0, 1.0, *penalties),
        LogitChange(1, 39, 1.0, 1.0, *penalties, 0, -1),
        LogitChange(2, -2, 0.0, 1.0, *penalties),
    ]
    got = change_logits(library, logits, changes, np.array([BROKEN_ROW, 5], np.int32))
    wanted = [LogitChange(1, 39, 1.0, 1.0, *penalties), LogitChange(2, 5, 0.0, 1.0, *penalties)]
    np.testing.assert_array_equal(got, change_logits(library, logits, wanted))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_token_before_is_looked_for_in_all_of_a_long_row(library: Library, policy: int) -> None:
    """Rows of changes that end within a warp, with one, and blocks later; the token is the first of them, the last, or
    none, and the next row has it.
    """
    library.configure(policy)
    lengths, width = (1, 30, 31, 32, 200, 64, 0, 5), 256
    logits, penalties = normal(9, len(lengths), width), (1.0, 0.0, 0.5)
    picked = np.array([tokens for length in lengths for tokens in (0, max(length - 1, 0), length)], np.int32)
    for which in range(3):
        changes, wanted = [], logits.copy()
        for row, length in enumerate(lengths):
            source = 3 * row + which
            changes.append(LogitChange(row, -1 - source, 0.0, 1.0, *penalties))
            changes += [LogitChange(row, token, 1.0, 0.0, *penalties, 0, -1 - source) for token in range(length)]
            wanted[row, :length] += 1.0
            wanted[row, picked[source]] -= 0.5
        np.testing.assert_array_equal(change_logits(library, logits, changes, picked), wanted)


def test_what_cannot_be_done_is_refused(library: Library) -> None:
    with pytest.raises(EmulatorError):
        draw(library, normal(1, 1, 40), [Draw()], 41)
    with pytest.raises(EmulatorError):
        draw(library, np.zeros((1, 1 << 20), np.float32), [Draw()])
