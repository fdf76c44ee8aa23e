"""Stop strings are found wherever the text is cut, and no part of one is ever sent."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyserve.text.stop import StopStrings

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, of several the longest, by searching the whole text."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, negative_len, stop = min(found)
    return text[: end + negative_len], stop


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@settings(deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=8))
@example("aabaabaaab", ["aabaaa"], [3, 5, 9])
@example("abcd", ["abcde", "bc"], [2])
def test_any_cutting_finds_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], places: list[int]
) -> None:
    watch = StopStrings(stops)
    sent, found = "", None
    for piece in cut(text, places):
        safe, found = watch.push(piece)
        sent += safe
        if found is not None:
            break
    if found is None:
        sent += watch.flush()
    assert (sent, found) == naive(text, stops)


@settings(deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_no_start_of_a_stop_string_is_sent_before_it_is_clear(text: str, stops: list[str], places: list[int]) -> None:
    watch = StopStrings(stops)
    pushed, sent = "", ""
    for piece in cut(text, places):
        safe, found = watch.push(piece)
        pushed += piece
        sent += safe
        if found is not None:
            return
        held = pushed.removeprefix(sent)
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((n for n in range(len(pushed) + 1) if pushed[len(pushed) - n :] in starts), default=0)
        assert len(held) == longest  # all that must be held back, and no more


def test_the_text_goes_on_when_a_start_turns_out_to_be_none() -> None:
    watch = StopStrings(["<|end|>"])
    assert watch.push("a <|en") == ("a ", None)
    assert watch.push("ough") == ("<|enough", None)
    assert watch.push("<") == ("", None)
    assert watch.flush() == "<"
    assert watch.flush() == ""


def test_nothing_is_sent_after_a_stop_string() -> None:
    watch = StopStrings(["END"])
    assert watch.push("a END b") == ("a ", "END")
    assert watch.push("more") == ("", "END")
    assert watch.flush() == ""


def test_of_two_complete_at_once_the_longer_one_counts() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", "ab")


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_passes(stops: list[str]) -> None:
    watch = StopStrings(stops)
    assert watch.push("any text") == ("any text", None)
    assert watch.flush() == ""


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    watch = StopStrings(["a" * 50_000 + "b"])
    start = time.process_time()
    for _ in range(2_000):
        watch.push("a" * 49)
        watch.push("c")
    assert time.process_time() - start < 3
