"""The simulator: its clock, its traces, its bound, and what it says of policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import numpy as np
import pytest

from pyserve.ledger import Limits
from tools import policy_sim
from tools.bounds import Shares, alone_ms, bound, one_machine
from tools.liveness_nightly import azure_shaped
from tools.policy_chart import draw
from tools.policy_sim import POLICIES, REFERENCES, SHIPPED, Result, pareto_front
from tools.simulation import Costs, Request, Simulation, conversations, read_trace, take

COSTS = Costs(step_ms=10.0, row_ms=1.0, token_ms=0.5, copy_gb_s=1.0, token_bytes=1_000_000)


def limits_of(num_pages: int, **changes: float) -> Limits:
    return Limits(**({"num_pages": num_pages, "page_size": 16, "num_slots": 8, "batch_tokens": 64} | changes))  # type: ignore[arg-type]


def test_a_request_alone_takes_what_the_costs_say() -> None:
    request = Request(5.0, 100, 3)
    outcome = Simulation(limits_of(100), COSTS).run([request])
    # Two chunks of the prompt, the second of which gives the first token, then two decode steps.
    expected = (10.0 + 64 * 0.5) + (10.0 + 1.0 + 35 * 0.5) + 2 * (10.0 + 1.0)
    assert outcome.completions == [pytest.approx(expected)]
    assert alone_ms(request, COSTS, 64) == pytest.approx(expected)
    assert outcome.makespan_ms == pytest.approx(5.0 + expected)
    assert outcome.gaps == {110: 2}


def test_a_full_pool_parks_and_counts_what_is_copied() -> None:
    requests = [Request(0.0, 64, 120), Request(0.0, 48, 120)]
    outcome = Simulation(limits_of(14), COSTS, check_every=1).run(requests)
    assert sum(outcome.parks) > 0 and outcome.num_recomputed == 0
    assert outcome.num_copied % 32 == 0, "whole pages, out and back"
    assert outcome.longest_park_ms >= 2 * 48 * 1.0, "one copy out and one back at a gigabyte a second"
    without = Simulation(limits_of(14), COSTS, host_pages=0).run(requests)
    assert without.num_copied == 0 and without.num_recomputed > 0


@pytest.mark.parametrize("rotation_delay_ms", [0.0, 2000.0])
@pytest.mark.parametrize("gb_s", [1.0, 0.02])
def test_slow_copies_between_the_steps_do_not_stop_them(rotation_delay_ms: float, gb_s: float) -> None:
    """A copy may take longer than one waits for a turn; still nobody is turned out without a step."""
    limits = limits_of(40, is_async=False, rotation_delay_ms=rotation_delay_ms)
    requests = [Request(0.0, 40 + 30 * number, 100) for number in range(6)]
    outcome = Simulation(limits, replace(COSTS, copy_gb_s=gb_s), check_every=1).run(requests)
    assert sum(outcome.parks) > 0 and outcome.num_steps < 6 * 100


def test_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(azure)
    assert first == Request(0.0, 374, 44)
    assert second == Request(second.arrival_ms, 396, 109) and second.arrival_ms == pytest.approx(4314.579)
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 7, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n')
    assert list(read_trace(mooncake)) == [Request(7.0, 6758, 500)]


def test_drawn_requests_have_the_shape_of_the_trace() -> None:
    requests = take(conversations(), 20_000)
    prompts = sorted(each.prompt_len for each in requests)
    answers = sorted(each.answer_len for each in requests)
    for lens, mean_len, median, p99 in ((prompts, 1155, 1020, 4142), (answers, 211, 129, 601)):
        assert mean(lens) == pytest.approx(mean_len, rel=0.05)
        assert lens[10_000] == pytest.approx(median, rel=0.05)
        assert lens[19_800] == pytest.approx(p99, rel=0.05)
    assert 20_000 / requests[-1].arrival_ms * 1e3 == pytest.approx(5.5, rel=0.05)


def test_one_machine_works_off_what_is_least_first() -> None:
    """The second passes the first, which has 8 left when it comes; the third waits for both, or passes the first."""
    arrivals, works = [0.0, 2.0, 9.0], [10.0, 3.0, 7.0]
    times = one_machine(arrivals, works, is_by_remaining=True)
    assert [end for end, _ in times] == [13.0, 3.0, 11.0]
    assert [middle for _, middle in times] == pytest.approx([(2 * 1.0 + 8 * 9.0) / 10, 1.5, 7.5])
    times = one_machine(arrivals, works, is_by_remaining=False)
    assert [end for end, _ in times] == [20.0, 3.0, 7.0]
    assert [middle for _, middle in times] == pytest.approx([(2 * 1.0 + 4 * 7.0 + 4 * 18.0) / 10, 1.5, 3.5])


@pytest.mark.parametrize("name", POLICIES | REFERENCES)
def test_no_policy_beats_the_bound(name: str) -> None:
    for seed in range(3):
        requests = [Request(each.arrival_ms / 20, each.prompt_len // 8 + 1, each.answer_len // 4 + 1)
                    for each in take(conversations(seed), 12)]  # fmt: skip
        limits = limits_of(60, num_slots=12)
        outcome = Simulation(limits, COSTS, (POLICIES | REFERENCES)[name]).run(requests)
        makespan_ms, completion_ms = bound(requests, COSTS, limits)
        assert outcome.makespan_ms >= makespan_ms
        assert mean(outcome.completions) >= completion_ms


def test_policies_differ() -> None:
    """A key that nobody reads would make all alike."""
    requests = [Request(0.0, 40 + 30 * number, 100) for number in range(6)]
    outcomes = {
        name: (outcome.makespan_ms, outcome.num_copied, tuple(outcome.parks))
        for name, policy in POLICIES.items()
        for outcome in [Simulation(limits_of(40), COSTS, policy).run(requests)]
    }
    assert outcomes["victim: largest"] != outcomes[SHIPPED] != outcomes["admission: room for 128 tokens"]


def test_the_bound_is_reached_by_requests_that_fill_the_pool_alone() -> None:
    """They come one after another, each takes every page: the bound on the makespan is what it takes."""
    requests = [Request(0.0, 1, 15)] * 3
    limits = limits_of(1)
    outcome = Simulation(limits, COSTS).run(requests)
    assert bound(requests, COSTS, limits) == pytest.approx((outcome.makespan_ms, mean(outcome.completions)))


def test_the_bound_is_reached_where_one_slot_serves_one_after_another() -> None:
    """Most of them come after a pause, which the bound knows of."""
    requests = [Request(0.0, 1, 15), *[Request(500.0, 1, 15)] * 3]
    limits = limits_of(100, num_slots=1)
    outcome = Simulation(limits, COSTS).run(requests)
    assert bound(requests, COSTS, limits) == pytest.approx((outcome.makespan_ms, mean(outcome.completions)))


def test_the_bound_on_completions_knows_that_nobody_gets_a_token_a_moment() -> None:
    """Two that fill the pool together: each alone, or one machine, would be done sooner on average."""
    requests = [Request(0.0, 1, 15)] * 6
    limits = limits_of(2)
    one_by_one = [sum(alone_ms(each, COSTS, 64) for each in requests[:count]) / 2 for count in range(1, 7)]
    assert bound(requests, COSTS, limits)[1] > mean(one_by_one)
    assert bound(requests, COSTS, limits)[1] <= mean(Simulation(limits, COSTS).run(requests).completions)


def test_shares_add_up_step_by_step() -> None:
    """Prompts of 100 tokens take two chunks, of which the first leaves 36 tokens or more behind it."""
    of = Shares(COSTS, limits_of(10)).of
    two, three = (of(np.array([100.0]), np.array([num])).item() for num in (2.0, 3.0))
    assert three - two == pytest.approx(10.0 * 7 / 10 + 1.0), "102 cells are 7 pages of the 10"
    assert two == pytest.approx(10.0 * (3 + 7 + 7) / 10 + 2 * 1.0 + 99 * 0.5)


def test_the_front_is_what_nobody_beats() -> None:
    fast, cheap, beaten, like_fast = (
        Result("fast", 3, 1.0, 2.0, 10.0, 9, 500, 0.5),
        Result("cheap", 2, 1.1, 2.0, 10.0, 2, 100, 0.5),
        Result("beaten by a hair", 0, 1.1, 2.0, 10.0, 2, 100, 0.4999),
        Result("fast again", 1, 1.0, 2.0, 10.0, 9, 500, 0.5),
    )
    assert pareto_front([fast, cheap, beaten, like_fast]) == [fast, cheap, like_fast]


def test_the_picture_has_a_dot_for_every_number() -> None:
    columns = [("seconds", [2.0, 1.0, 3.0], ".1f"), ("-fairness", [-0.5, -0.25, -0.75], ".2f")]
    root = ElementTree.fromstring(draw(["ours <is> this", "one", "another"], columns, ["one"]))
    dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(dots) == 6
    assert float(dots[1].get("cx", "")) < float(dots[0].get("cx", "")) < float(dots[2].get("cx", "")), "less is left"
    filled = [number for number, dot in enumerate(dots) if dot.get("fill") == dot.get("stroke")]
    assert filled == [1, 4], "those on the front"
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ours <is> this", "1.0", "3.0", "0.75", "0.25"} <= set(texts)


def test_the_report_says_whether_the_shipped_policy_is_on_the_front(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    drawn = tmp_path / "drawn.svg"
    policy_sim.main(["--requests", "30", "--runs", "2", "--small", "0", "--output", str(report), "--draw", str(drawn)])
    text = report.read_text()
    report.write_text(text + "\n## By hand\n\nKept.\n")
    policy_sim.main(["--requests", "5", "--runs", "1", "--small", "0", "--output", str(report)])
    assert report.read_text().endswith("\n\n## By hand\n\nKept.\n") and report.read_text().startswith("# Policies\n")
    assert drawn.read_text().count("<circle") == 6 * len(POLICIES)
    assert all(f"| {name} |" in text for name in POLICIES)
    assert "on the Pareto front." in text
    (shipped,) = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {SHIPPED} |")]
    of_bound, error = map(float, shipped[2].split(" ± "))
    assert 1 <= of_bound <= float(shipped[3]) and error < of_bound - 1 + 0.5


def test_nobody_is_parked_often_on_a_short_night() -> None:
    parks = azure_shaped(3, num_pages=600, requests=take(conversations(3), 80))
    assert parks.total() == 80 and parks[0] < 80
