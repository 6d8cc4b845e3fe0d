"""Finds function calls that are JSON objects, in an answer that arrives in pieces.

A call begins when its name and the opening brace of its arguments have been read. What is inside that brace is returned
as the model writes it.
"""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

from serving.text.answer_pieces import Piece
from serving.text.state_parser import SPACE
from serving.text.tool_calls.call_parser import CallParser
from serving.text.tool_calls.formats import JsonCallFormat
from serving.text.tool_calls.json_extent import JsonExtent

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS = 512
"""How far into a call its name is looked for. A call with a longer head, or with its keys in another order, is returned
when it is whole."""


class JsonCallParser(CallParser):
    """An AnswerParser of calls and content."""

    def __init__(self, tool_format: JsonCallFormat) -> None:
        super().__init__((tool_format.opener,), self._around if tool_format.bare else self._text)
        self._format = tool_format
        self._skipped = f"{SPACE}}}{tool_format.filler}"
        self._object = ""
        self._extent = JsonExtent()
        self._in_group = False
        """A call has been read, and the end of the calls has not."""

    def flush(self) -> list[Piece]:
        self._held += self._object
        return super().flush()

    def _is_of_calls(self, rest: str) -> bool:
        return not self._object if self._in_group else not rest

    def _at_opener(self) -> bool:
        self._hold(len(self._format.opener))
        self._state = self._around
        return True

    def _around(self) -> bool:
        """After an opener or a call: another call, the end of the calls, or content again."""
        self._hold(len(self._unread) - len(self._unread.lstrip(self._skipped)))
        unread, closer = self._unread, self._format.closer
        if not unread:
            return False
        if unread[0] == "{":
            self._object, self._extent = "", JsonExtent()
            self._state = self._whole_or_head
            return True
        if closer.startswith(unread) and closer != unread:
            return False
        if closer and unread.startswith(closer):
            self._hold(len(closer))
        return self._leave()

    def _leave(self) -> bool:
        """The text that ends calls is not content."""
        if self._in_group:
            self._held = ""
        self._in_group = False
        return super()._leave()

    def _whole_or_head(self) -> bool:
        """An object that may be a call, until its arguments begin or it is whole."""
        known = len(self._object)
        end = self._extent.end(self._unread)
        self._object += self._read(end)
        head = _HEAD.match(self._object, 0, _MAX_HEAD_CHARS) if known < _MAX_HEAD_CHARS else None
        if head is not None:
            self._begin_call(head[1])
            self._in_group = True
            self._unread = self._object[head.end() :] + self._unread
            self._object, self._extent = "", JsonExtent()
            self._state = self._arguments
            return True
        if end is None:
            return False
        text, self._object = self._object, ""
        call = _whole_call(text)
        if call is None:
            self._in_group = False
            self._held += text
            return self._leave()
        self._begin_call(*call)
        self._in_group = True
        self._end_arguments()
        self._state = self._around
        return True

    def _arguments(self) -> bool:
        return self._argue_object(self._extent, self._behind_arguments)

    def _behind_arguments(self) -> bool:
        """The closing brace of the call itself, which some models forget; or more keys, which are ignored."""
        self._unread = self._unread.lstrip(SPACE)
        if self._unread.startswith(","):
            self._extent = JsonExtent(depth=1)
            self._state = self._other_keys
        elif self._unread:
            self._unread = self._unread.removeprefix("}")
            self._state = self._around
        return bool(self._unread)

    def _other_keys(self) -> bool:
        end = self._extent.end(self._unread)
        self._read(end)
        if end is not None:
            self._state = self._around
        return end is not None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, if the text is a call. Arguments may also be a string that contains an object."""
    try:
        fields = from_json(text)
        arguments = fields.get("arguments", fields.get("parameters"))
        if isinstance(arguments, str):
            shown, arguments = arguments, from_json(arguments)
        else:
            shown = json.dumps(arguments, ensure_ascii=False)
    except ValueError:
        return None
    name = fields.get("name")
    return (name, shown) if isinstance(name, str) and name and isinstance(arguments, dict) else None
