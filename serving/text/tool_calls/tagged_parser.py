"""Finds function calls that have tags around each argument, in an answer that arrives in pieces.

A call begins when its name has been read. The text of a string is returned as the model writes it, any other value when
it is whole. The schema says which values are strings, or the format itself if it has a mark for them. Text between the
tags of a call is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.text.answer_pieces import overlap
from serving.text.state_parser import SPACE, first_mark
from serving.text.tool_calls.argument_values import argument_json, argument_types
from serving.text.tool_calls.call_parser import MAX_NAME_CHARS, NAME, NAME_SO_FAR, CallParser
from serving.text.tool_calls.formats import TaggedFormat

_NAME_END = re.compile(r"(?<=\S)(?=[\s<])")
_STRING = frozenset(("string",))


class TaggedCallParser(CallParser):
    """An AnswerParser of calls and content. `schemas` are those of the functions' parameters, by function name."""

    def __init__(self, form: TaggedFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._prefix, self._suffix = form.prefix.strip(SPACE), form.suffix.strip(SPACE)
        openers = filter(None, (self._prefix, form.call_opener, form.name_opener))
        super().__init__(tuple(openers), self._text)
        self._form = form
        self._schemas = schemas
        self._ends = tuple(filter(None, (form.function_closer, form.call_closer)))
        self._value_ends = (f"{form.value_frame}{form.value_closer}", form.value_closer)
        self._value = ""
        self._schema: Mapping[str, Any] = {}
        self._types: frozenset[str] | None = None
        self._is_string = False
        """Whether the value being read is a string, which is its text."""

    def _is_of_calls(self, rest: str) -> bool:
        outside = (self._text, self._at_opener, self._behind_prefix, self._behind_function, self._behind_end)
        if self._state not in outside:
            return True
        marks = (*self._openers, self._form.call_closer, *filter(None, (self._suffix,)))
        return any(mark.startswith(rest) for mark in marks)

    def _leave(self) -> bool:
        """The opener is also content."""
        self._hold(next((len(mark) for mark in self._openers if self._unread.startswith(mark)), 0))
        return super()._leave()

    def _behind_prefix(self) -> bool:
        """Before the first of several calls."""
        opener = self._form.call_opener
        if not self._skip_blanks() or (opener.startswith(self._unread) and opener != self._unread):
            return False
        if not self._unread.startswith(opener):
            return super()._leave()
        self._state = self._at_opener
        return True

    def _at_opener(self) -> bool:
        """A call begins with its name and what follows it."""
        if self._prefix and self._unread.startswith(self._prefix):
            self._hold(len(self._prefix))
            self._state = self._behind_prefix
            return True
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
        closer_len = max(1, len(form.name_closer))
        if 0 <= end <= MAX_NAME_CHARS - closer_len and NAME.fullmatch(rest[:end]):
            behind = rest[end:].removeprefix(form.name_closer)
            if form.name_closer or (follows := self._begins_arguments(behind)):
                self._begin(rest[:end].strip(), behind)
                return True
            if follows is None:
                return False
        elif end < 0 and len(rest) < MAX_NAME_CHARS:
            so_far = rest[: len(rest) - overlap(rest, [form.name_closer])]
            if NAME_SO_FAR.fullmatch(so_far):
                return False
        return self._leave()

    def _begins_arguments(self, text: str) -> bool | None:
        """Whether a key or the end of a call follows a name; None while that is unknown."""
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
            self._state = self._behind_end if self._suffix else self._text
        else:
            self._state = self._at_opener
        return bool(self._unread)

    def _behind_function(self) -> bool:
        """The end of the call, which some models forget."""
        return self._skip_end(self._form.call_closer)

    def _behind_end(self) -> bool:
        """The end of all calls, if it is there."""
        return self._skip_end(self._suffix)

    def _skip_end(self, closer: str) -> bool:
        unread = self._unread.lstrip(SPACE)
        if closer.startswith(unread) and closer != unread:
            return False
        if unread.startswith(closer):
            self._unread = unread.removeprefix(closer)
        self._state = self._text
        return bool(self._unread)

    def _key(self) -> bool:
        form, rest, opener = self._form, self._unread.removeprefix(self._form.key_opener), None
        end = rest.find(form.key_closer)
        if end < 0 and len(rest) < MAX_NAME_CHARS:
            return False
        key = rest[:end].strip()
        if not 0 <= end <= MAX_NAME_CHARS - len(form.key_closer) or not key:
            self._drop_mark()
            return True
        behind = rest[end + len(form.key_closer) :]
        if form.value_opener:
            behind = behind.lstrip(SPACE)
            openers = tuple(filter(None, (form.value_opener, form.string_opener)))
            if any(each.startswith(behind) and behind != each for each in openers):
                return False
            opener = next((each for each in openers if behind.startswith(each)), None)
            if opener is None:
                self._drop_mark()
                return True
            behind = behind.removeprefix(opener)
        if form.value_frame and not behind:
            return False
        self._unread = behind.removeprefix(form.value_frame) if form.value_frame else behind
        self._types = argument_types(self._schema, key)
        self._is_string = opener == form.string_opener if form.string_opener else self._types == _STRING
        self._argue_key(key)
        self._argue('"' if self._is_string else "")
        self._value = ""
        self._state = self._value_of_key
        return bool(self._unread)

    def _drop_mark(self) -> None:
        """The mark does not begin an argument."""
        self._unread = self._unread.removeprefix(self._form.key_opener)
        self._state = self._in_call

    def _value_of_key(self) -> bool:
        place, mark = first_mark(self._unread, self._value_ends)
        text = self._read(place)
        if self._is_string:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text
        self._read(len(mark))
        if not mark:
            return False
        is_json = bool(self._form.string_opener)
        self._argue('"' if self._is_string else argument_json(self._value, self._types, is_json=is_json))
        self._state = self._in_call
        return bool(self._unread)
