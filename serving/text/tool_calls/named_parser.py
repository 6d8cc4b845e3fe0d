"""Finds function calls that are a name and a JSON object, in an answer that arrives in pieces.

A call begins when the opening brace of its arguments has been read. White space before the first call is not content,
nor is what stands between calls and after the last.
"""

from __future__ import annotations

import re

from serving.text.answer_pieces import overlap
from serving.text.state_parser import SPACE
from serving.text.tool_calls.call_parser import MAX_NAME_CHARS, NAME, NAME_SO_FAR, CallParser
from serving.text.tool_calls.formats import NamedFormat
from serving.text.tool_calls.json_extent import JsonExtent

_ID = re.compile(r"\s*[\w\-]+\s*")
_ID_SO_FAR = re.compile(r"\s*[\w\-]*\s*")
_KNOWN_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""What chat templates accept as the id of a call."""


class NamedCallParser(CallParser):
    """An AnswerParser of calls and content."""

    def __init__(self, form: NamedFormat) -> None:
        super().__init__(tuple(filter(None, (form.prefix, form.call_opener))), self._text)
        self._form = form
        self._tail = form.tail.strip(SPACE)
        self._name = ""
        self._id = ""
        self._ids: set[str] = set()
        self._extent = JsonExtent()

    def _is_of_calls(self, rest: str) -> bool:
        return any(mark.startswith(rest) for mark in (self._tail, self._form.suffix, *self._openers))

    def _at_opener(self) -> bool:
        """At an opener or after a call: a call, the end of the calls, or content again."""
        unread = self._unread.lstrip(SPACE)
        num_blanks, form = len(self._unread) - len(unread), self._form
        if not unread:
            return False
        marks = [mark for mark in (form.call_opener, form.prefix, form.suffix) if mark]
        mark = next((mark for mark in marks if unread.startswith(mark)), None)
        if mark is None and any(each.startswith(unread) for each in marks):
            return False
        if mark is None:
            return self._leave()
        self._hold(num_blanks + len(mark))
        if mark == form.call_opener:
            self._state = self._name_of_call
        elif mark == form.suffix and self._behind_call:
            self._held = ""
            self._state = self._text
        elif mark == form.suffix:
            self._leave()
        return True

    def _name_of_call(self) -> bool:
        unread, separator = self._unread, self._form.separator
        place = unread.find(separator)
        if place < 0:
            marks = filter(None, (separator, self._form.id_opener))
            so_far = unread[: len(unread) - overlap(unread, marks)]
            if len(unread) < MAX_NAME_CHARS and self._is_head(so_far, NAME_SO_FAR, _ID_SO_FAR):
                return False
            return self._leave()
        if place >= MAX_NAME_CHARS - len(separator) or not self._is_head(unread[:place], NAME, _ID):
            return self._leave()
        self._name, self._id = self._parted(unread[:place])
        self._hold(place + len(separator))
        self._state = self._arguments_begin
        return bool(self._unread)

    def _is_head(self, text: str, name_like: re.Pattern[str], id_like: re.Pattern[str]) -> bool:
        """Whether the text is a name, with the id after its opener if there is one."""
        opener = self._form.id_opener
        name, mark, call_id = text.partition(opener) if opener else (text, "", "")
        if not mark:
            return name_like.fullmatch(name) is not None
        return NAME.fullmatch(name) is not None and id_like.fullmatch(call_id) is not None

    def _parted(self, head: str) -> tuple[str, str]:
        """The name, and the id if it is usable: well formed, and not the id of another call of the answer."""
        opener = self._form.id_opener
        name, _, call_id = (part.strip() for part in (head.partition(opener) if opener else (head, "", "")))
        known = _KNOWN_ID.fullmatch(call_id) is not None and call_id not in self._ids
        return name, call_id if known else ""

    def _arguments_begin(self) -> bool:
        unread = self._unread.lstrip(SPACE)
        if not unread:
            return False
        if unread[0] != "{":
            return self._leave()
        self._begin_call(self._name, call_id=self._id or None)
        self._ids.add(self._id)
        self._unread, self._extent = unread, JsonExtent()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        return self._argue_object(self._extent, self._behind_arguments)

    def _behind_arguments(self) -> bool:
        """The end of a call, which some models forget."""
        unread = self._unread.lstrip(SPACE)
        if not unread or (self._tail.startswith(unread) and unread != self._tail):
            return False
        if self._tail and unread.startswith(self._tail):
            self._unread = unread[len(self._tail) :]
        self._state = self._at_opener
        return bool(self._unread)
