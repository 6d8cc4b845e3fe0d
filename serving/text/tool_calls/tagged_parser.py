"""Finds function calls that have tags around each argument, in an answer that arrives in pieces.

What comes out depends on the text alone, never on how it was cut, and is not taken back. A call begins when its name
has been read. The text of a string is told as the model writes it, any other value when it is whole. Within a call,
what stands between its tags is not told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from serving.text.answer_pieces import CallPiece, Piece, overlap
from serving.text.tool_calls.argument_values import argument_json, argument_types
from serving.text.tool_calls.formats import TaggedFormat

_SPACE = " \t\r\n"
_MAX_NAME_CHARS = 512
"""Of a function, or of an argument."""
_NAME = re.compile(r"\s*[\w.\-:/]+\s*")
_NAME_SO_FAR = re.compile(r"\s*[\w.\-:/]*\s*")
_NAME_END = re.compile(r"(?<=\S)(?=[\s<])")
_STRING = frozenset(("string",))


class TaggedCallParser:
    """An AnswerParser of calls and content. `schemas` are those of the functions' parameters, by the functions' names.
    `_held` was read since the content ended, and is content unless a call follows."""

    def __init__(self, form: TaggedFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._form = form
        self._schemas = schemas
        self._openers = tuple(filter(None, (form.call_opener, form.name_opener)))
        self._ends = tuple(filter(None, (form.function_closer, form.call_closer)))
        self._value_ends = (f"{form.value_frame}{form.value_closer}", form.value_closer)
        self._unread = ""
        self._held = ""
        self._value = ""
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] | None = None
        self._num_calls = 0
        self._num_arguments = 0
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
        outside = self._state in (self._text, self._name_of_call, self._behind_function)
        if outside and not (self._behind_call and self._is_wrapping(rest.strip(_SPACE))):
            self._say(rest)
        self._held = self._unread = ""
        return self._take()

    def _is_wrapping(self, rest: str) -> bool:
        return any(mark.startswith(rest) for mark in (*self._openers, self._form.call_closer))

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._behind_call = False

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self._num_calls, None, text))

    def _text(self) -> bool:
        """Content, up to an opener. White space waits: before an opener it is none."""
        unread = self._unread
        place, mark = _first(unread, self._openers)
        said = unread[:place].rstrip(_SPACE)
        self._say(said)
        if not mark:
            self._unread = unread[len(said) :]
            return False
        self._held = unread[len(said) : place]
        self._unread = unread[place:]
        self._state = self._name_of_call
        return True

    def _leave(self) -> None:
        """What was held, and the opener, are content."""
        mark = next((mark for mark in self._openers if self._unread.startswith(mark)), "")
        self._say(f"{self._held}{mark}")
        self._held, self._unread = "", self._unread[len(mark) :]
        self._state = self._text

    def _name_of_call(self) -> bool:
        """At an opener: a call begins with its name and what follows that."""
        form, rest = self._form, self._unread.removeprefix(self._form.call_opener)
        if form.name_opener:
            rest = rest.lstrip(_SPACE)
            if form.name_opener.startswith(rest) and rest != form.name_opener:
                return False
            if not rest.startswith(form.name_opener):
                self._leave()
                return True
            rest = rest.removeprefix(form.name_opener)
        if form.name_closer:
            end = rest.find(form.name_closer)
        else:
            found = _NAME_END.search(rest)
            end = found.start() if found else -1
        if 0 <= end < _MAX_NAME_CHARS and _NAME.fullmatch(rest[:end]):
            behind = rest[end:].removeprefix(form.name_closer)
            if form.name_closer or (follows := self._begins_arguments(behind)):
                self._begin(rest[:end].strip(), behind)
                return True
            if follows is None:
                return False
        elif end < 0 and len(rest) < _MAX_NAME_CHARS and _NAME_SO_FAR.fullmatch(rest):
            return False
        self._leave()
        return True

    def _begins_arguments(self, text: str) -> bool | None:
        """Whether a key or the end of a call follows a name; None while that cannot be told."""
        begun, marks = text.lstrip(_SPACE), (self._form.key_opener, *self._ends)
        if begun.startswith(marks):
            return True
        return None if any(mark.startswith(begun) for mark in marks) else False

    def _begin(self, name: str, behind: str) -> None:
        self._pieces.append(CallPiece(self._num_calls, name, ""))
        self._schema = self._schemas.get(name, {})
        self._held, self._unread, self._num_arguments = "", behind, 0
        self._behind_call = True
        self._state = self._in_call

    def _in_call(self) -> bool:
        """Between arguments: the next one, or the end."""
        form = self._form
        place, mark = _first(self._unread, (form.key_opener, *self._ends, *self._openers))
        self._unread = self._unread[place:]
        if not mark:
            return False
        if mark == form.key_opener:
            self._state = self._key
            return True
        self._argue("}" if self._num_arguments else "{}")
        self._num_calls += 1
        if mark == form.function_closer:
            self._unread = self._unread.removeprefix(mark)
            self._state = self._behind_function
        elif mark == form.call_closer:
            self._unread = self._unread.removeprefix(mark)
            self._state = self._text
        else:
            self._state = self._name_of_call
        return bool(self._unread)

    def _behind_function(self) -> bool:
        """The end of the call, which some models forget."""
        unread, closer = self._unread.lstrip(_SPACE), self._form.call_closer
        if closer.startswith(unread) and closer != unread:
            return False
        if unread.startswith(closer):
            self._unread = unread.removeprefix(closer)
        self._state = self._text
        return bool(self._unread)

    def _key(self) -> bool:
        form, rest = self._form, self._unread.removeprefix(self._form.key_opener)
        end = rest.find(form.key_closer)
        if end < 0 and len(rest) < _MAX_NAME_CHARS:
            return False
        key = rest[:end].strip()
        if not 0 <= end < _MAX_NAME_CHARS or not key:
            self._drop_mark()
            return True
        behind = rest[end + len(form.key_closer) :]
        if form.value_opener:
            behind = behind.lstrip(_SPACE)
            if form.value_opener.startswith(behind) and behind != form.value_opener:
                return False
            if not behind.startswith(form.value_opener):
                self._drop_mark()
                return True
            behind = behind.removeprefix(form.value_opener)
        if form.value_frame and not behind:
            return False
        self._unread = behind.removeprefix(form.value_frame) if form.value_frame else behind
        self._types = argument_types(self._schema, key)
        self._argue(f"{', ' if self._num_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._argue('"' if self._types == _STRING else "")
        self._num_arguments += 1
        self._value = ""
        self._state = self._value_of_key
        return bool(self._unread)

    def _drop_mark(self) -> None:
        """It begins no argument."""
        self._unread = self._unread.removeprefix(self._form.key_opener)
        self._state = self._in_call

    def _value_of_key(self) -> bool:
        unread = self._unread
        place, mark = _first(unread, self._value_ends)
        if self._types == _STRING:
            self._argue(json.dumps(unread[:place], ensure_ascii=False)[1:-1])
        else:
            self._value += unread[:place]
        self._unread = unread[place + len(mark) :]
        if not mark:
            return False
        self._argue('"' if self._types == _STRING else argument_json(self._value, self._types))
        self._state = self._in_call
        return bool(self._unread)


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks is, and which. Without one, where one may begin at the end of the text, and ""."""
    places = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return len(text) - overlap(text, marks), ""
    place, _, mark = min(places)
    return place, mark
