"""Stop strings in a stream: nothing that may belong to one is sent before it is clear."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Watches the text of one sequence for its stop strings.

    The stop string that is complete first wins; of several that are complete at one character, the longest. So the
    result depends on the text alone, not on how it is cut into pieces, and a stop string that is there ends the text
    at once, even while a longer one might still follow.

    Each stop string is followed by the automaton of Knuth, Morris and Pratt ("Fast pattern matching in strings",
    1977), whose state is the length of the longest start of the stop string that the text ends in. The largest state
    is what has to be held back. The work per character does not depend on the length of the stop strings.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Empty strings are ignored: they stop nothing."""
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = {stop[0] for stop in self._stops}
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string found). The stop string and what follows it are never sent."""
        if self._found is not None:
            return "", self._found
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            self._found = self._step(seen[end - 1])
            if self._found is not None:
                self._held = ""
                return seen[: end - len(self._found)], self._found
        safe_len = len(seen) - max(self._states)
        self._held = seen[safe_len:]
        return seen[:safe_len], None

    def flush(self) -> str:
        """The text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Takes one character; the longest stop string that it completes."""
        found: str | None = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._fallbacks[i][state - 1]
            state += stop[state] == char
            self._states[i] = state
            if state == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each start of `stop`, the length of its longest proper end that is a start of `stop` too."""
    lengths = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = lengths[length - 1]
        length += stop[i] == stop[length]
        lengths[i] = length
    return lengths
