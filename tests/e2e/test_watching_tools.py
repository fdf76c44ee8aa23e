"""The tools that watch a server see what is wrong with it; and a short soak finds nothing wrong with ours."""

from __future__ import annotations

import pytest

from tools.keepalive_probe import Probe, verdict
from tools.replay import scaled, summary, table
from tools.simulation import Request
from tools.soak import ZERO_AT_END, Question, arguments, faults, slope_per_minute, soak_server, state_faults
from tools.streams import Answer
from tools.timeline import Timeline, quantile

TIMINGS = b'"timings":{"n_preempt":1}'


def streamed(*lines: bytes, num_choices: int = 1) -> Answer:
    answer = Answer(num_choices, status=200)
    for line in lines:
        answer.read_line(line)
    return answer


def text(content: str, index: int = 0) -> bytes:
    return b'data: {"choices":[{"text":"%s","index":%d,"finish_reason":null}]}' % (content.encode(), index)


def end(index: int = 0) -> bytes:
    return b'data: {"choices":[{"text":"","index":%d,"finish_reason":"length"}],%s}' % (index, TIMINGS)


DONE = b"data: [DONE]"
QUESTION = Question({}, 1, ["one two"])


def test_an_answer_as_it_should_be_has_no_faults() -> None:
    whole = streamed(text("one"), b": preempted", b": preempt-keepalive", b": resumed", text(" two"), end(), DONE)
    assert faults(QUESTION, whole, is_cut=False) == []
    assert faults(QUESTION, streamed(text("one"), b": preempted"), is_cut=True) == []
    assert faults(QUESTION, Answer(), is_cut=True) == []


@pytest.mark.parametrize(
    ("lines", "is_cut", "complaint"),
    [
        ((text("one tow"), end(), DONE), False, "differs from its solo text: from character 5 of 7"),
        ((text("one"), end(), DONE), False, "differs"),
        ((text("one  "),), True, "differs"),
        ((text("one two"), end()), False, "whole: False"),
        ((text("one two"), DONE), False, "ended with [None]"),
        ((b": resumed", text("one two"), end(), DONE), False, "out of order"),
        ((b": preempted", b": preempted"), True, "out of order"),
        ((b": preempted", text("one two"), end(), DONE), False, "ended while parked"),
        ((b": preempted", b": resumed", b": preempted", b": resumed", text("one two"), end(), DONE), False, "2 parks"),
        ((text("one"), b'data: {"error":{"message":"no room"}}'), False, "no room"),
        ((b'data: {"error":{"message":"no room"}}',), True, "no room"),
    ],
)
def test_faults_of_an_answer_are_seen(lines: tuple[bytes, ...], is_cut: bool, complaint: str) -> None:
    found = faults(QUESTION, streamed(*lines), is_cut)
    assert any(complaint in each for each in found), found


def test_notices_belong_to_their_choice() -> None:
    lines = (b": preempted 1", text("a"), b": resumed 1", text("b", 1), end(), end(1), DONE)
    answer = streamed(*lines, num_choices=2)
    assert answer.notices == [[], ["preempted", "resumed"]]
    assert faults(Question({}, 2, ["a", "b"]), answer, is_cut=False) == []


def test_pages_that_are_lost_are_seen() -> None:
    now = dict.fromkeys(ZERO_AT_END, 0.0)
    now |= {"pool_pages": 10.0, "pool_pages_free": 4.0, "pool_pages_cached": 6.0}
    assert state_faults(now) == []
    assert state_faults(now | {"pool_pages_free": 3.0}) == ["of 10 pages 3 are free and 6 cached"]
    assert state_faults(now | {"preempt_ram_bytes": 1.0}) == ["preempt_ram_bytes is 1"]


def test_growth_is_that_after_the_first_third() -> None:
    warm_up = [(float(at), 10.0 * at) for at in range(10)]
    flat = [(float(at), 100.0) for at in range(10, 31)]
    assert slope_per_minute(warm_up + flat) == pytest.approx(0)
    assert slope_per_minute([(float(at), at / 60) for at in range(60)]) == pytest.approx(1)


def test_gaps_of_a_timeline_leave_out_parks() -> None:
    timeline = Timeline()
    for at, line in (
        (1, text("a")),
        (2, text("b")),
        (2, b": preempted"),
        (8, b": resumed"),
        (9, text("c")),
        (10, end()),
    ):
        timeline.read_line(line, at)
    assert timeline.gaps_s == [1, 7]
    assert timeline.running_gaps_s(0, 10) == [1]
    assert timeline.running_gaps_s(1.5, 10) == []
    assert timeline.num_parked == 0 and not timeline.is_done
    timeline.read_line(DONE, 10)
    assert timeline.is_done


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)] == [50, 90, 99, 100, 100]
    assert quantile([3.0], 0.5) == 3


@pytest.mark.parametrize(("silence_s", "status"), [(2.1, 0), (3.1, 1)])
def test_the_probe_fails_when_a_parked_stream_is_silent_for_too_long(silence_s: float, status: int) -> None:
    probe = Probe(Timeline(parks=[0]), silences_s=[9.0, silence_s], parked_silences_s=[silence_s])
    assert verdict(probe, limit_s=3.0) == status


def test_the_probe_says_when_it_proved_nothing() -> None:
    assert verdict(Probe(silences_s=[9.0]), limit_s=3.0) == 2
    assert verdict(Probe(Timeline(error="cut"), silences_s=[9.0]), limit_s=3.0) == 1


def test_replayed_requests_fit_the_server() -> None:
    assert scaled(Request(5.0, 1000, 200), 0.1, 1024) == Request(5.0, 100, 20)
    assert scaled(Request(5.0, 3, 2), 0.01, 1024) == Request(5.0, 1, 1)
    huge = scaled(Request(5.0, 9000, 9000), 1.0, 1024)
    assert huge.prompt_len + huge.answer_len == 1024


def test_survivors_are_apart_from_parked() -> None:
    survivor = Timeline(0.0, tokens=[1.0, 1.01], is_done=True)
    parked = Timeline(0.0, tokens=[2.0, 7.0], parks=[1], is_done=True)
    found = summary([survivor, parked, Timeline(error="refused")])
    assert found["failed"] == 1 and found["parks"] == 1
    assert found["survivors"]["gap_ms"]["max"] == pytest.approx(10)
    assert found["parked"]["gap_ms"]["max"] == pytest.approx(5000)
    assert "| between tokens, parked | 1 | 5000.0 |" in table(found)
    assert "| between tokens, parked | 0 | - |" in table(summary([survivor]))


def test_a_short_soak_finds_nothing_wrong() -> None:
    flags = "--minutes 0.1 --clients 12 --requests 5 --parallel 8"
    soak, now = soak_server(arguments().parse_args(flags.split()))
    assert soak.violations == []
    assert soak.counts["finished"] >= 5 and soak.counts["hung up"] >= 1
    assert now["n_preempt_total"] >= 1, "there was pressure"
