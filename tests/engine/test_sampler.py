"""The sampler: penalties by hand-computed values, bans, log-probabilities, statistics, the same in any company."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from pyserve.ops import BROKEN_ROW
from pyserve.sampler import Sampled, SampleRequest, has_broken_row, sample, token_logprobs
from pyserve.types import SamplingParams

LOWEST = torch.finfo(torch.float32).min
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def one(logits: list[float], params: SamplingParams, tokens: list[int] | None = None, prompt_len: int = 1) -> Sampled:
    """The sample of one row."""
    request = SampleRequest(params, [0] if tokens is None else tokens, prompt_len)
    return sample(torch.tensor([logits]), [request])[0]


def draws(logits: list[float], params: SamplingParams, num_draws: int, *, seed: int = 1) -> Counter[int]:
    """Tokens drawn at positions 1, 2, ... of one seed: what a sequence with constant logits would generate."""
    requests = [SampleRequest(replace(params, seed=seed), range(position), 1) for position in range(1, num_draws + 1)]
    return Counter(sampled.token for sampled in sample(torch.tensor([logits]).repeat(num_draws, 1), requests))


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, dim=0).tolist()


def chi_square(counts: Counter[int], probabilities: list[float]) -> float:
    total = counts.total()
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probabilities) if p > 0)


# --- greedy and truncation


def test_temperature_zero_takes_the_most_probable_and_the_lower_id_on_a_tie() -> None:
    assert one([0.0, 3.0, 1.0], GREEDY).token == 1
    assert one([0.0, 3.0, 3.0], GREEDY).token == 1


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    params = replace(PLAIN, temperature=5.0, top_k=1)
    assert draws([0.0, 0.1, 0.2, 0.15], params, 200) == Counter({2: 200})


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (replace(PLAIN, top_k=2), {0, 1}),
        (replace(PLAIN, top_p=0.75), {0, 1}),  # 0.5 is not enough, 0.5 + 0.25 is
        (replace(PLAIN, min_p=0.4), {0, 1}),  # at least 0.4 * 0.5
        (PLAIN, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_exactly_the_tokens_that_it_should(params: SamplingParams, kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.10)]
    assert set(draws(logits, params, 1000)) == kept


# --- statistics: fixed seeds, so these either always pass or always fail


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_this_temperature(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.3, 1.5]
    counts = draws(logits, replace(PLAIN, temperature=temperature), 8000)
    assert chi_square(counts, softmax(logits, temperature)) < 24.3  # 99.9 % point at 7 degrees of freedom


def test_draws_after_truncation_follow_the_renormalised_distribution() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    counts = draws(logits, replace(PLAIN, top_k=3), 8000)
    assert chi_square(counts, [4 / 9, 3 / 9, 2 / 9, 0.0]) < 13.8  # 99.9 % point at 2 degrees of freedom


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Pairs drawn at one position by seeds s and s + 1 spread evenly over the square of two fair coins."""
    fair = torch.zeros(4000, 2)
    seeds = [SampleRequest(replace(PLAIN, seed=seed), [0] * 7, 1) for seed in range(4000)]
    tokens = [sampled.token for sampled in sample(fair, seeds)]
    pairs = Counter(2 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True))
    assert chi_square(pairs, [0.25] * 4) < 16.3  # 99.9 % point at 3 degrees of freedom
    by_position = draws([0.0, 0.0], PLAIN, 4000)
    assert chi_square(by_position, [0.5, 0.5]) < 10.8  # 99.9 % point at 1 degree of freedom


def test_the_random_number_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3))
    requests = [SampleRequest(replace(PLAIN, seed=s % 8), [0] * (1 + s // 8), 1) for s in range(64)]
    first = [sampled.token for sampled in sample(logits.clone(), requests)]
    torch.manual_seed(99)
    assert [sampled.token for sampled in sample(logits.clone(), requests)] == first
    other = [replace_seed(request, request.params.seed + 8) for request in requests]
    assert [sampled.token for sampled in sample(logits.clone(), other)] != first


def replace_seed(request: SampleRequest, seed: int) -> SampleRequest:
    return SampleRequest(replace(request.params, seed=seed), request.tokens, request.prompt_len)


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_any_64_bit_seed_is_accepted(seed: int) -> None:
    assert one([0.0, 0.0], replace(PLAIN, seed=seed)).token in (0, 1)


# --- company


def mixed_requests() -> list[SampleRequest]:
    tokens = [[1, 2, 3, 1], [4] * 9, [7, 8, 9], [5, 5, 6], [2], [3, 1, 4, 1, 5, 9, 2, 6]]
    params = [
        GREEDY,
        replace(PLAIN, seed=5, num_logprobs=3),
        SamplingParams(seed=6, repeat_penalty=1.3, presence_penalty=0.5),
        SamplingParams(seed=7, temperature=1.7, logit_bias=((3, 4.0), (2, float("-inf")))),
        SamplingParams(seed=8, banned_until=((0, 5), (1, 5)), num_logprobs=0),
        SamplingParams(seed=9, frequency_penalty=0.8, repeat_last_n=4),
    ]
    return [SampleRequest(p, t, 1) for p, t in zip(params, tokens, strict=True)]


def test_a_row_gives_the_same_alone_and_in_any_company() -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)) * 3
    requests = mixed_requests()
    together = sample(logits.clone(), requests)
    alone = [sample(logits[row : row + 1].clone(), [request])[0] for row, request in enumerate(requests)]
    assert together == alone
    order = [4, 2, 5, 0, 3, 1]
    shuffled = sample(logits[order].clone(), [requests[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 10), []) == []


# --- penalties, bias, bans


def adjusted(logits: list[float], params: SamplingParams, tokens: list[int], prompt_len: int = 1) -> list[float]:
    """The row as the kernel sees it: `sample` changes its argument in place."""
    tensor = torch.tensor([logits])
    sample(tensor, [SampleRequest(params, tokens, prompt_len)])
    return tensor[0].tolist()


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens() -> None:
    params = replace(GREEDY, repeat_penalty=2.0)
    assert adjusted([4.0, -4.0, 3.0, 0.0], params, [0, 1, 0]) == [2.0, -8.0, 3.0, 0.0]


def test_frequency_counts_occurrences_and_presence_counts_once() -> None:
    params = replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.25)
    assert adjusted([1.0, 1.0, 1.0], params, [0, 0, 0, 1]) == [-0.75, 0.25, 1.0]


def test_all_three_penalties_add_up_in_llama_cpps_order() -> None:
    params = replace(GREEDY, repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert adjusted([4.0, 4.0], params, [0, 0]) == [4.0 / 2 - 2 * 0.5 - 0.25, 4.0]


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [(2, [1.0, 1.0, 0.5, 0.5]), (-1, [0.5, 0.5, 0.5, 0.5]), (0, [1.0] * 4), (100, [0.5] * 4)],
)
def test_the_window_is_the_last_n_tokens_with_the_prompts(last_n: int, expected: list[float]) -> None:
    params = replace(GREEDY, repeat_penalty=2.0, repeat_last_n=last_n)
    assert adjusted([1.0] * 4, params, [0, 1, 2, 3], prompt_len=3) == expected


def test_bias_is_added_before_the_penalties_and_duplicates_add_up() -> None:
    params = replace(GREEDY, repeat_penalty=2.0, logit_bias=((0, 1.0), (0, 2.0), (1, 1.0)))
    assert adjusted([1.0, 1.0], params, [0]) == [2.0, 2.0]


def test_a_bias_of_minus_infinity_bans_a_token() -> None:
    logits = [10.0, 0.0, 0.0]
    assert 0 not in draws(logits, replace(PLAIN, logit_bias=((0, float("-inf")),)), 300)
    assert one(logits, replace(GREEDY, logit_bias=((0, float("-inf")),))).token == 1


def test_a_token_is_banned_until_enough_tokens_are_generated() -> None:
    params = replace(GREEDY, banned_until=((0, 2),))
    assert one([9.0, 1.0], params, [5, 5, 5], prompt_len=3).token == 1  # nothing generated
    assert one([9.0, 1.0], params, [5, 5, 5], prompt_len=2).token == 1  # one generated
    assert one([9.0, 1.0], params, [5, 5, 5], prompt_len=1).token == 0  # two generated


def test_a_ban_holds_against_a_large_bias() -> None:
    assert one([0.0, 0.0], replace(GREEDY, banned_until=((1, 9),), logit_bias=((1, 100.0),))).token == 0


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    params = replace(
        GREEDY, logit_bias=((7, 5.0), (-1, 5.0)), banned_until=((9, 4),), repeat_penalty=2.0, repeat_last_n=-1
    )
    assert adjusted([1.0, 2.0], params, [8, 1], prompt_len=2) == [1.0, 1.0]


# --- numbers that are none


@pytest.mark.parametrize("params", [GREEDY, PLAIN, SamplingParams()])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_of_numbers_that_are_none_nothing_is_made(params: SamplingParams, num_logprobs: int | None) -> None:
    nan, inf = float("nan"), float("inf")
    params = replace(params, num_logprobs=num_logprobs)
    for logits in ([nan, 1.0, 2.0], [1.0, nan, -inf], [0.0, inf, 5.0], [-inf] * 3, [nan] * 3):
        assert one(logits, params) == Sampled(BROKEN_ROW, None), logits
        assert has_broken_row(torch.tensor([[0.0, 1.0, 2.0], logits]))
    assert one([-inf, -inf, -3.0], params).token == 2
    assert not has_broken_row(torch.tensor([[0.0, 1.0, 2.0], [-inf, -inf, -3.0]]))


def test_a_broken_row_changes_nothing_for_the_others() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 9.0], [4.0, 3.0, 1.0]])
    requests = [SampleRequest(params, [0], 1) for params in (GREEDY, GREEDY, PLAIN)]
    alone = sample(logits[2:].clone(), requests[2:])
    assert [each.token for each in sample(logits, requests)] == [1, BROKEN_ROW, alone[0].token]


def test_when_everything_is_banned_there_is_no_token() -> None:
    bans = tuple((token, float("-inf")) for token in range(3))
    assert one([1.0, 2.0, 3.0], replace(PLAIN, logit_bias=bans)).token == BROKEN_ROW
    assert one([1.0, 2.0, 3.0], replace(GREEDY, logit_bias=bans[:2])).token == 2


def test_very_low_and_very_high_temperatures_give_finite_choices() -> None:
    assert one([1.0, 2.0, 3.0], replace(PLAIN, temperature=1e-6)).token == 2
    assert chi_square(draws([0.0, 9.0], replace(PLAIN, temperature=1e6), 2000), [0.5, 0.5]) < 10.8


# --- log-probabilities


def test_logprobs_are_those_of_the_full_distribution_before_temperature() -> None:
    logits = [math.log(p) for p in (0.1, 0.6, 0.3)]
    sampled = one(logits, replace(GREEDY, num_logprobs=2))
    assert sampled.logprobs is not None
    assert sampled.logprobs.token == sampled.token == 1
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.6), abs=1e-6)
    assert [token for token, _ in sampled.logprobs.top] == [1, 2]
    assert [value for _, value in sampled.logprobs.top] == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-6)
    hot = one(logits, replace(PLAIN, temperature=3.0, num_logprobs=2))
    assert hot.logprobs is not None and hot.logprobs.top == sampled.logprobs.top


def test_logprobs_are_taken_after_bias_and_penalties() -> None:
    params = replace(GREEDY, logit_bias=((0, math.log(2.0)),), num_logprobs=1)
    sampled = one([0.0, 0.0], params, [5])
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(2 / 3), abs=1e-6)


def test_no_logprobs_unless_asked_and_zero_alternatives_give_the_token_alone() -> None:
    assert one([0.0, 1.0], GREEDY).logprobs is None
    sampled = one([0.0, 1.0], replace(GREEDY, num_logprobs=0))
    assert sampled.logprobs is not None and sampled.logprobs.top == ()


def test_alternatives_of_equal_probability_come_in_order_of_their_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0])
    assert [token for token, _ in token_logprobs(logits, 0, 5).top] == [1, 3, 6, 2, 4]
    flat = token_logprobs(torch.zeros(5000), 17, 20)
    assert [token for token, _ in flat.top] == list(range(20))
    assert flat.logprob == pytest.approx(-math.log(5000), abs=1e-5)


def test_more_alternatives_than_tokens_give_the_whole_vocabulary() -> None:
    assert [token for token, _ in token_logprobs(torch.tensor([0.0, 1.0]), 0, 20).top] == [1, 0]


def test_probability_zero_is_reported_as_the_lowest_float() -> None:
    entry = token_logprobs(torch.tensor([0.0, float("-inf"), float("-inf")]), 1, 3)
    assert entry.logprob == LOWEST
    assert dict(entry.top) == {0: 0.0, 1: LOWEST, 2: LOWEST}
    banned = one([0.0, 3.0], replace(GREEDY, banned_until=((1, 9),), num_logprobs=2))
    assert banned.logprobs is not None and dict(banned.logprobs.top)[1] == LOWEST


def test_scoring_a_token_leaves_the_logits_as_they_were() -> None:
    logits = torch.tensor([float("-inf"), 1.0, 2.0])
    token_logprobs(logits, 1, 2)
    assert logits.tolist() == [float("-inf"), 1.0, 2.0]
