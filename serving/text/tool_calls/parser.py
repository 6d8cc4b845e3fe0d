"""Finds function calls in an answer that arrives in pieces.

What comes out depends on the text alone, never on how it was cut. Nothing that was told is taken back: a call begins
when its name and the brace of its arguments have been read, and what is inside that brace is told as the model writes
it, as far as it writes. Everything else that is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pydantic_core import from_json

from serving.text.answer_pieces import CallPiece, Piece, overlap
from serving.text.tool_calls.formats import ToolFormat
from serving.text.tool_calls.json_extent import JsonExtent

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS = 512
"""How far a call's name is looked for before its end. With a longer head, or another order, it is told when whole."""
_SPACE = " \t\r\n"


class CallParser:
    """Follows one answer. Its content comes as strings.

    `_unread` has not been looked at for good. `_held` was read since the opener, or the call before, and is content
    unless a call follows.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._skipped = f"{_SPACE}}}{tool_format.filler}"
        self._unread = ""
        self._held = ""
        self._object = ""
        self._extent = JsonExtent()
        self._num_calls = 0
        self._in_group = False
        """A call was read, and what ends them was not."""
        self._spoke = True
        """Something was said since the last call, or there was none."""
        self._pieces: list[Piece] = []
        self._state: Callable[[], bool] = self._around if tool_format.bare else self._text

    def push(self, text: str) -> list[Piece]:
        """What can be told by now."""
        self._unread += text
        while self._unread and self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """The answer has ended."""
        rest = f"{self._held}{self._object}{self._unread}"
        wrapping = not self._object if self._in_group else not self._spoke and rest.isspace()
        if not wrapping:
            self._say(rest)
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._spoke = True
            self._pieces.append(text)

    def _text(self) -> bool:
        """Content, up to an opener. White space waits: before an opener it is none."""
        opener, unread = self._format.opener, self._unread
        place = unread.find(opener)
        end = place if place >= 0 else len(unread) - overlap(unread, [opener])
        said = unread[:end].rstrip(_SPACE)
        self._say(said)
        if place < 0:
            self._unread = unread[len(said) :]
            return False
        self._held = unread[len(said) : place + len(opener)]
        self._unread = unread[place + len(opener) :]
        self._state = self._around
        return True

    def _around(self) -> bool:
        """Behind an opener or a call: another call, what ends them, or content again."""
        unread, closer = self._unread.lstrip(self._skipped), self._format.closer
        self._held += self._unread[: len(self._unread) - len(unread)]
        self._unread = unread
        if not unread:
            return False
        if unread[0] == "{":
            self._object, self._extent = "", JsonExtent()
            self._state = self._whole_or_head
            return True
        if closer.startswith(unread) and closer != unread:
            return False
        if closer and unread.startswith(closer):
            self._held += closer
            self._unread = unread[len(closer) :]
        self._leave()
        return True

    def _leave(self) -> None:
        held, self._held = self._held, ""
        if not self._in_group:
            self._say(held)
        self._in_group = False
        self._state = self._text

    def _whole_or_head(self) -> bool:
        """An object that may be a call, until its arguments begin or it is whole."""
        known = len(self._object)
        end = self._extent.end(self._unread)
        self._object += self._unread[:end]
        self._unread = "" if end is None else self._unread[end:]
        head = _HEAD.match(self._object, 0, _MAX_HEAD_CHARS) if known < _MAX_HEAD_CHARS else None
        if head is not None:
            self._begin(head[1], "")
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
            self._leave()
        else:
            self._begin(*call)
            self._num_calls += 1
            self._state = self._around
        return True

    def _begin(self, name: str, arguments: str) -> None:
        self._pieces.append(CallPiece(self._num_calls, name, arguments))
        self._held, self._in_group, self._spoke = "", True, False

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
        """The brace of the call itself, which some models forget; or more keys, which say nothing here."""
        self._unread = self._unread.lstrip(_SPACE)
        if self._unread.startswith(","):
            self._extent = JsonExtent(depth=1)
            self._state = self._other_keys
        elif self._unread:
            self._unread = self._unread.removeprefix("}")
            self._state = self._around
        return bool(self._unread)

    def _other_keys(self) -> bool:
        end = self._extent.end(self._unread)
        self._unread = "" if end is None else self._unread[end:]
        if end is not None:
            self._state = self._around
        return end is not None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, if this is a call. Arguments may also be a string that holds an object."""
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
