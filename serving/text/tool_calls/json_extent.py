"""Finds the end of a JSON object in text that arrives in pieces."""

from __future__ import annotations

import re

_JSON_MARKS = re.compile(r'["\\{}\[\]]')


class JsonExtent:
    """Follows one JSON object to its end. The object need not be valid."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """The place after its last brace; None if that has not come yet."""
        place = 1 if self._escaped else 0
        self._escaped = False
        while mark := _JSON_MARKS.search(text, place):
            place, char = mark.end(), mark[0]
            if self._in_string:
                if char == "\\":
                    self._escaped = place == len(text)
                    place += 1
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place
        return None
