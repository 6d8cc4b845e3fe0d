"""Finds stop strings in text that arrives in pieces, and holds back text that may become one.

The result depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(word: str) -> list[int]:
    """For each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length - 1]
        if word[i] == word[length]:
            length += 1
        table[i] = length
    return table


class StopMatcher:
    """Follows one text. The stop string that ends first wins; of several that end together, the longest.

    Each string's state is the length of its longest prefix that the text so far ends with (Knuth-Morris-Pratt), so the
    cost is linear in the text whatever the strings are. With `keep_stop` the match stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        # Longest first: of strings that end at the same character, the first in this list wins.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._keep_stop = keep_stop
        self._held = ""
        self.matched: str | None = None

    @property
    def stops(self) -> Sequence[str]:
        return self._stops

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Returns the text that is safe to show; after a match, nothing more. Without `may_match`, a stop string that
        ends in this text does not count; one that begins in it may count later."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        pending = self._held + text
        for i, char in enumerate(text, start=len(self._held)):
            stop = self._advance(char)
            if stop is not None and may_match:
                self.matched, self._held = stop, ""
                end = i + 1
                return pending[: end if self._keep_stop else end - len(stop)]
        safe_len = len(pending) - max(self._states)
        self._held = pending[safe_len:]
        return pending[:safe_len]

    def flush(self) -> str:
        """The text has ended: what was held back is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for i, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            length = self._states[i]
            while length and stop[length] != char:
                length = table[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                found = found or stop
                length = table[length - 1]
            self._states[i] = length
        return found
