"""Finds function calls that have tags around each argument, in an answer that arrives in pieces.

A call begins when its name has been read. The text of a string is told as the model writes it, any other value when it
is whole. Within a call, what stands between its tags is not told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.text.state_parser import SPACE, first_mark
from serving.text.tool_calls.argument_values import argument_json, argument_types
from serving.text.tool_calls.call_parser import CallParser
from serving.text.tool_calls.formats import TaggedFormat

_MAX_NAME_CHARS = 512
"""Of a function, or of an argument."""
_NAME = re.compile(r"\s*[\w.\-:/]+\s*")
_NAME_SO_FAR = re.compile(r"\s*[\w.\-:/]*\s*")
_NAME_END = re.compile(r"(?<=\S)(?=[\s<])")
_STRING = frozenset(("string",))


class TaggedCallParser(CallParser):
    """An AnswerParser of calls and content. `schemas` are those of the functions' parameters, by the functions'
    names."""

    def __init__(self, form: TaggedFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tuple(filter(None, (form.call_opener, form.name_opener))), self._text)
        self._form = form
        self._schemas = schemas
        self._ends = tuple(filter(None, (form.function_closer, form.call_closer)))
        self._value_ends = (f"{form.value_frame}{form.value_closer}", form.value_closer)
        self._value = ""
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] | None = None

    def _is_of_calls(self, rest: str) -> bool:
        if self._state not in (self._text, self._at_opener, self._behind_function):
            return True
        return any(mark.startswith(rest) for mark in (*self._openers, self._form.call_closer))

    def _leave(self) -> bool:
        """The opener is content, too."""
        self._hold(next((len(mark) for mark in self._openers if self._unread.startswith(mark)), 0))
        return super()._leave()

    def _at_opener(self) -> bool:
        """A call begins with its name and what follows that."""
        form, rest = self._form, self._unread.removeprefix(self._form.call_opener)
        if form.name_opener:
            rest = rest.lstrip(SPACE)
            if form.name_opener.startswith(rest) and rest != form.name_opener:
                return False
            if not rest.startswith(form.name_opener):
                return self._leave()
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
        return self._leave()

    def _begins_arguments(self, text: str) -> bool | None:
        """Whether a key or the end of a call follows a name; None while that cannot be told."""
        begun, marks = text.lstrip(SPACE), (self._form.key_opener, *self._ends)
        if begun.startswith(marks):
            return True
        return None if any(mark.startswith(begun) for mark in marks) else False

    def _begin(self, name: str, behind: str) -> None:
        self._begin_call(name)
        self._schema = self._schemas.get(name, {})
        self._unread = behind
        self._state = self._in_call

    def _in_call(self) -> bool:
        """Between arguments: the next one, or the end."""
        form = self._form
        place, mark = first_mark(self._unread, (form.key_opener, *self._ends, *self._openers))
        self._read(place)
        if not mark:
            return False
        if mark == form.key_opener:
            self._state = self._key
            return True
        self._end_named_arguments()
        if mark == form.function_closer:
            self._unread = self._unread.removeprefix(mark)
            self._state = self._behind_function
        elif mark == form.call_closer:
            self._unread = self._unread.removeprefix(mark)
            self._state = self._text
        else:
            self._state = self._at_opener
        return bool(self._unread)

    def _behind_function(self) -> bool:
        """The end of the call, which some models forget."""
        unread, closer = self._unread.lstrip(SPACE), self._form.call_closer
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
            behind = behind.lstrip(SPACE)
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
        self._argue_key(key)
        self._argue('"' if self._types == _STRING else "")
        self._value = ""
        self._state = self._value_of_key
        return bool(self._unread)

    def _drop_mark(self) -> None:
        """It begins no argument."""
        self._unread = self._unread.removeprefix(self._form.key_opener)
        self._state = self._in_call

    def _value_of_key(self) -> bool:
        place, mark = first_mark(self._unread, self._value_ends)
        text = self._read(place)
        if self._types == _STRING:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text
        self._read(len(mark))
        if not mark:
            return False
        self._argue('"' if self._types == _STRING else argument_json(self._value, self._types))
        self._state = self._in_call
        return bool(self._unread)
