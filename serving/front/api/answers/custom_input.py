"""Reads the text in a call of a custom tool from the JSON in which the model writes it, piece by piece."""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

from serving.front.api.answers.tools_schema import CUSTOM_ARGUMENT

_SPACE = r"[ \t\r\n]*"
_HEAD = re.compile(rf'{_SPACE}\{{{_SPACE}"{CUSTOM_ARGUMENT}"{_SPACE}:{_SPACE}"')
_MAX_HEAD_CHARS = 64
_STOPS = re.compile(r'["\\]')
_ESCAPE_CHARS = 6
"""The length of `\\u0041`; a character beyond the first plane takes two of these."""
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_FIRST_HALF = re.compile(_HIGH)
_ESCAPE = re.compile(rf'{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')


class CustomInput:
    """Reads one call's arguments. The result depends on the text alone, never on how it was cut into pieces.

    If the arguments do not begin with CUSTOM_ARGUMENT, everything is returned at the end: the text of that argument,
    or, if there is no such text, the arguments as they are.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._inside = False
        self._ended = False

    def push(self, arguments: str) -> str:
        """The text that is known by now and was not returned before."""
        if self._ended:
            return ""
        self._unread += arguments
        if not self._inside:
            head = _HEAD.match(self._unread, 0, _MAX_HEAD_CHARS)
            if head is None:
                return ""
            self._inside = True
            self._unread = self._unread[head.end() :]
        return self._text()

    def flush(self) -> str:
        """The rest of the text. To be called when the call has ended."""
        rest, self._unread = self._unread, ""
        if self._ended:
            return ""
        self._ended = True
        return _unescaped(rest) if self._inside else _as_whole(rest)

    def _text(self) -> str:
        """The text up to the quote that ends it, or up to an incomplete escape."""
        unread, end = self._unread, 0
        while stop := _STOPS.search(unread, end):
            if stop[0] == '"':
                self._ended = True
                self._unread = ""
                return _unescaped(unread[: stop.start()])
            length = _escape_chars(unread, stop.start())
            if length is None:
                self._unread = unread[stop.start() :]
                return _unescaped(unread[: stop.start()])
            end = stop.start() + length
        self._unread = ""
        return _unescaped(unread)


def _escape_chars(text: str, start: int) -> int | None:
    """The length of the escape at `start`, with its second half if it has one; None if it may go on after the text."""
    if len(text) == start + 1:
        return None
    if text[start + 1] != "u":
        return 2
    if len(text) < start + _ESCAPE_CHARS:
        return None
    if not _FIRST_HALF.match(text, start):
        return _ESCAPE_CHARS
    second = text[start + _ESCAPE_CHARS : start + 2 * _ESCAPE_CHARS]
    if not "\\u".startswith(second[:2]):
        return _ESCAPE_CHARS
    if len(second) < _ESCAPE_CHARS:
        return None
    return 2 * _ESCAPE_CHARS if re.match(_LOW, second) else _ESCAPE_CHARS


def _unescaped(text: str) -> str:
    """The inside of a JSON string, unescaped. An invalid escape stays as it is; half of a character becomes U+FFFD."""
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    value: str = json.loads(f'"{escape[0]}"')
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_whole(arguments: str) -> str:
    try:
        value = from_json(arguments)
    except ValueError:
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
