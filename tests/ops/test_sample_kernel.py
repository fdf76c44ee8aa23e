"""The sampling kernel against the reference's probabilities and the same random number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyserve.ops import BROKEN_ROW
from pyserve.ops import reference_linear as reference


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> int:
    token: int = torch.ops.pyserve.sample_row(logits, temperature, top_k, top_p, min_p, seed, position)
    return token


def random_logits(vocab: int, seed: int, size: float) -> torch.Tensor:
    """Of a few distinct values, so that there are ties."""
    return (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * size).mul(8).round().div(8)


@given(
    vocab=st.integers(1, 3000),
    size=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 300, 5000]),
    top_p=st.sampled_from([0.0, 0.3137, 0.9533, 1.0]),  # of no flat distribution an exact share
    min_p=st.sampled_from([0.0, 0.05, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10**6),
)
@settings(max_examples=300, deadline=None)
def test_the_random_number_picks_from_the_references_distribution(
    vocab: int, size: float, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    logits = random_logits(vocab, seed % 1000, size)
    token = sample(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position)
    probabilities = reference.sampling_probabilities(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    assert probabilities[token] > 0
    is_sorted = 0 < top_k < vocab or top_p < 1  # else the draw goes by id
    order = logits.argsort(descending=True, stable=True) if is_sorted else torch.arange(vocab)
    upper = probabilities[order].cumsum(0)[int((order == token).nonzero())]
    u = reference.uniform(seed, position)
    assert upper - probabilities[token] - 1e-6 <= u <= upper + 1e-6


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_without_temperature_the_first_of_the_best_is_picked(temperature: float) -> None:
    logits = torch.zeros(1000)
    logits[[700, 31, 999]] = 2.5
    assert sample(logits, temperature) == 31
    logits[999] = 2.625
    assert sample(logits, temperature) == 999


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0}],
)
def test_banned_tokens_are_never_picked(options: dict[str, float]) -> None:
    logits = torch.full((5000,), -math.inf)
    allowed = {17, 18, 4000}
    logits[sorted(allowed)] = torch.tensor([1.0, 1.0, 0.5])
    picked = {sample(logits, **{"temperature": 1.0, **options}, seed=1, position=i) for i in range(200)}  # type: ignore[arg-type]
    assert picked <= allowed
    assert len(picked) == (1 if "temperature" in options else 3)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}]
)
@pytest.mark.parametrize("vocab", [1, 5, 64, 1027])
def test_a_row_that_is_none_to_pick_from_gives_no_token(options: dict[str, float], vocab: int) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        for bad in (math.nan, math.inf):
            logits = random_logits(vocab, 3, 2.0)
            assert 0 <= sample(logits, **options) < vocab  # type: ignore[arg-type]
            logits[place] = bad
            assert sample(logits, **options) == BROKEN_ROW, (place, bad)  # type: ignore[arg-type]
            logits[:] = -math.inf
            logits[place] = bad
            assert sample(logits, **options) == BROKEN_ROW, (place, bad)  # type: ignore[arg-type]
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        assert sample(torch.full((vocab,), bad), **options) == BROKEN_ROW  # type: ignore[arg-type]


def test_top_k_keeps_the_lower_ids_of_equal_logits() -> None:
    picked = {sample(torch.zeros(50_000), top_k=3, seed=9, position=i) for i in range(100)}
    assert picked == {0, 1, 2}


def test_top_p_of_a_flat_distribution_keeps_its_share() -> None:
    picked = [sample(torch.zeros(2000), top_p=0.25, seed=3, position=i) for i in range(2000)]
    assert max(picked) == pytest.approx(500, abs=3)
    assert len(set(picked)) > 450


def test_truncation_comes_before_temperature() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])  # 0.64, 0.24, 0.09, 0.03: top_p 0.8 keeps two
    picked = {sample(logits, 100.0, top_p=0.8, seed=2, position=i) for i in range(200)}
    assert picked == {0, 1}


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.99}])
def test_frequencies_follow_the_probabilities(options: dict[str, float]) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(5))
    num_draws = 6000
    counts = torch.zeros(30, dtype=torch.float64)
    for position in range(num_draws):
        counts[sample(logits, 0.8, seed=77, position=position, **options)] += 1  # type: ignore[arg-type]
    expected = reference.sampling_probabilities(logits, temperature=0.8, **options) * num_draws  # type: ignore[arg-type]
    assert bool(((counts - expected).abs() <= 5 * expected.sqrt() + 1).all())


def test_the_choice_depends_on_seed_and_position_alone() -> None:
    logits = random_logits(49152, 1, 2.0)
    first = [sample(logits, seed=seed, position=position) for seed in range(5) for position in range(5)]
    again = [sample(logits.clone(), seed=seed, position=position) for seed in range(5) for position in range(5)]
    assert first == again
    assert len(set(first)) > 20
