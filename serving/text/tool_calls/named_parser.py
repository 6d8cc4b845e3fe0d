"""Finds function calls that are a name and a JSON object, in an answer that arrives in pieces.

What comes out depends on the text alone, never on how it was cut, and is not taken back. A call begins when the brace
of its arguments has been read. What is no call is content, but for the white space before the first one, and what
stands between calls and behind the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from serving.text.answer_pieces import CallPiece, Piece, overlap
from serving.text.tool_calls.formats import NamedFormat
from serving.text.tool_calls.json_extent import JsonExtent

_SPACE = " \t\r\n"
_MAX_NAME_CHARS = 512
_NAME = re.compile(r"\s*[\w.\-:/]+\s*")
_NAME_SO_FAR = re.compile(r"\s*[\w.\-:/]*\s*")


class NamedCallParser:
    """An AnswerParser of calls and content. `_held` was read since the content ended, and is content unless a call
    follows."""

    def __init__(self, form: NamedFormat) -> None:
        self._form = form
        self._openers = tuple(filter(None, (form.prefix, form.call_opener)))
        self._tail = form.tail.strip(_SPACE)
        self._unread = ""
        self._held = ""
        self._name = ""
        self._extent = JsonExtent()
        self._num_calls = 0
        self._behind_call = False
        self._pieces: list[Piece] = []
        self._state: Callable[[], bool] = self._text

    def push(self, text: str) -> list[Piece]:
        self._unread += text
        while self._unread and self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        rest = f"{self._held}{self._unread}"
        marks = (self._tail, self._form.suffix, *self._openers)
        if not (self._behind_call and any(mark.startswith(rest.strip(_SPACE)) for mark in marks)):
            self._say(rest)
        self._held = self._unread = ""
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._behind_call = False

    def _text(self) -> bool:
        """Content, up to an opener. White space waits: before an opener it is none."""
        unread = self._unread
        places = [(place, mark) for mark in self._openers if (place := unread.find(mark)) >= 0]
        place, mark = min(places, default=(len(unread) - overlap(unread, self._openers), ""))
        said = unread[:place].rstrip(_SPACE)
        self._say(said)
        if not mark:
            self._unread = unread[len(said) :]
            return False
        self._held = unread[len(said) : place]
        self._unread = unread[place:]
        self._state = self._around
        return True

    def _around(self) -> bool:
        """At an opener, or behind a call: a call, the end of them, or content again."""
        unread = self._unread.lstrip(_SPACE)
        blank, form = self._unread[: len(self._unread) - len(unread)], self._form
        if not unread:
            return False
        marks = [mark for mark in (form.call_opener, form.prefix, form.suffix) if mark]
        mark = next((mark for mark in marks if unread.startswith(mark)), None)
        if mark is None and any(each.startswith(unread) for each in marks):
            return False
        if mark is None:
            self._leave()
            return True
        self._held += blank + mark
        self._unread = unread[len(mark) :]
        if mark == form.call_opener:
            self._state = self._name_of_call
        elif mark == form.suffix and self._behind_call:
            self._held = ""
            self._state = self._text
        elif mark == form.suffix:
            self._leave()
        return True

    def _leave(self) -> None:
        """What was held is content."""
        held, self._held = self._held, ""
        self._say(held)
        self._state = self._text

    def _name_of_call(self) -> bool:
        unread, separator = self._unread, self._form.separator
        place = unread.find(separator)
        if place < 0:
            so_far = unread[: len(unread) - overlap(unread, [separator])]
            if len(unread) < _MAX_NAME_CHARS and _NAME_SO_FAR.fullmatch(so_far):
                return False
            self._leave()
            return True
        if place >= _MAX_NAME_CHARS - len(separator) or not _NAME.fullmatch(unread[:place]):
            self._leave()
            return True
        self._name = unread[:place].strip()
        self._held += unread[: place + len(separator)]
        self._unread = unread[place + len(separator) :]
        self._state = self._arguments_begin
        return bool(self._unread)

    def _arguments_begin(self) -> bool:
        unread = self._unread.lstrip(_SPACE)
        if not unread:
            return False
        if unread[0] != "{":
            self._leave()
            return True
        self._pieces.append(CallPiece(self._num_calls, self._name, ""))
        self._held, self._unread, self._extent = "", unread, JsonExtent()
        self._behind_call = True
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._extent.end(self._unread)
        self._pieces.append(CallPiece(self._num_calls, None, self._unread[:end]))
        self._unread = "" if end is None else self._unread[end:]
        if end is None:
            return False
        self._num_calls += 1
        self._state = self._behind_arguments
        return True

    def _behind_arguments(self) -> bool:
        """What ends a call, which some models forget."""
        unread = self._unread.lstrip(_SPACE)
        if not unread or (self._tail.startswith(unread) and unread != self._tail):
            return False
        if self._tail and unread.startswith(self._tail):
            self._unread = unread[len(self._tail) :]
        self._state = self._around
        return bool(self._unread)
