"""Finds function calls that are a list of Python's calls, in an answer that arrives in pieces.

What comes out depends on the text alone, never on how it was cut, and is not taken back. A call begins when its name
and that of its first argument, or the end of it, have been read. An argument is told when it is whole; one without a
name is not told. What is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from serving.text.answer_pieces import CallPiece, Piece, overlap
from serving.text.tool_calls.formats import PythonicFormat
from serving.text.tool_calls.python_literals import ArgumentExtent, literal_json

_SPACE = " \t\r\n"
_MAX_HEAD_CHARS = 1024
"""Of a function's name with that of its first argument, or of an argument's name."""
_HEAD = re.compile(r"\s*([\w.:/\-]+)\(\s*(?:(?=\))|(?=[\w.\-]+\s*=[^=]))")
_HEAD_SO_FAR = re.compile(r"\s*(?:[\w.:/\-]+(?:\(\s*(?:[\w.\-]+\s*=?)?)?)?")
_KEY = re.compile(r"([\w.\-]+)\s*=(?=[^=])")
_KEY_SO_FAR = re.compile(r"[\w.\-]+\s*=?")


class PythonicCallParser:
    """An AnswerParser of calls and content. `_held` was read since the content ended, or the call before, and is
    content unless a call follows."""

    def __init__(self, form: PythonicFormat) -> None:
        self._form = form
        self._unread = ""
        self._held = ""
        self._key: str | None = None
        self._value = ""
        self._extent = ArgumentExtent()
        self._num_calls = 0
        self._num_arguments = 0
        self._marked = False
        """The list is behind an opener."""
        self._behind_call = False
        """A call was read, and nothing was said since."""
        self._pieces: list[Piece] = []
        self._state: Callable[[], bool] = self._beginning

    def push(self, text: str) -> list[Piece]:
        self._unread += text
        while self._unread and self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        rest = f"{self._held}{self._unread}"
        in_call = self._state in (self._argument, self._argument_value)
        if not (in_call or (self._behind_call and self._is_wrapping(rest.strip(_SPACE)))):
            self._say(rest)
        self._held = self._unread = ""
        return self._take()

    def _is_wrapping(self, rest: str) -> bool:
        return rest in ("", ",") or self._form.closer.startswith(rest)

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._behind_call = False

    def _argue(self, text: str) -> None:
        self._pieces.append(CallPiece(self._num_calls, None, text))

    def _hold(self, count: int) -> None:
        self._held += self._unread[:count]
        self._unread = self._unread[count:]

    def _skip_blanks(self) -> bool:
        """Whether anything follows them."""
        self._hold(len(self._unread) - len(self._unread.lstrip(_SPACE)))
        return bool(self._unread)

    def _leave(self) -> bool:
        """What was held is content, as is what follows it."""
        held, self._held = self._held, ""
        self._say(held)
        self._state = self._text
        return True

    def _beginning(self) -> bool:
        """Where a list needs no opener."""
        if not self._skip_blanks():
            return False
        opener = self._form.opener
        if self._unread[0] == self._form.prefix:
            self._hold(1)
            self._marked = False
            self._state = self._head
            return True
        if self._unread.startswith(opener):
            self._hold(len(opener))
            self._state = self._behind_opener
            return True
        if opener.startswith(self._unread):
            return False
        return self._leave()

    def _text(self) -> bool:
        """Content, up to an opener. White space waits: before an opener it is none."""
        opener, unread = self._form.opener, self._unread
        place = unread.find(opener)
        end = place if place >= 0 else len(unread) - overlap(unread, [opener])
        said = unread[:end].rstrip(_SPACE)
        self._say(said)
        self._unread = unread[len(said) :]
        if place < 0:
            return False
        self._hold(place - len(said) + len(opener))
        self._state = self._behind_opener
        return True

    def _behind_opener(self) -> bool:
        if not self._skip_blanks():
            return False
        if self._unread[0] != self._form.prefix:
            return self._leave()
        self._hold(1)
        self._marked = True
        self._state = self._head
        return True

    def _head(self) -> bool:
        """In a list, where a call has to begin."""
        unread = self._unread
        head = _HEAD.match(unread, 0, _MAX_HEAD_CHARS)
        if head is None:
            if len(unread) < _MAX_HEAD_CHARS and _HEAD_SO_FAR.fullmatch(unread):
                return False
            return self._leave()
        self._pieces.append(CallPiece(self._num_calls, head[1], ""))
        self._held, self._unread = "", unread[head.end() :]
        self._num_arguments = 0
        self._behind_call = True
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Where an argument may begin, or the call ends. The end of the list ends a call, too."""
        self._unread = self._unread.lstrip(_SPACE)
        if not self._unread:
            return False
        if self._unread[0] == ",":
            self._unread = self._unread[1:]
            return True
        if self._unread[0] in (self._form.tail, self._form.suffix):
            self._unread = self._unread.removeprefix(self._form.tail)
            self._argue("}" if self._num_arguments else "{}")
            self._num_calls += 1
            self._state = self._behind_arguments
            return True
        key = _KEY.match(self._unread, 0, _MAX_HEAD_CHARS)
        if key is None and len(self._unread) < _MAX_HEAD_CHARS and _KEY_SO_FAR.fullmatch(self._unread):
            return False
        self._key = None if key is None else key[1]
        self._unread = self._unread[key.end() if key else 0 :]
        self._value, self._extent = "", ArgumentExtent()
        self._state = self._argument_value
        return True

    def _argument_value(self) -> bool:
        end = self._extent.end(self._unread)
        self._value += self._unread[:end]
        self._unread = "" if end is None else self._unread[end:]
        if end is None:
            return False
        if self._key is not None:
            separator = ", " if self._num_arguments else "{"
            self._argue(
                f"{separator}{json.dumps(self._key, ensure_ascii=False)}: {literal_json(self._value)}"
            )
            self._num_arguments += 1
        self._state = self._argument
        return True

    def _behind_arguments(self) -> bool:
        """Another call, or the end of the list."""
        if not self._skip_blanks():
            return False
        if self._unread[0] == ",":
            self._hold(1)
            self._state = self._behind_comma
            return True
        if self._unread[0] != self._form.suffix:
            return self._leave()
        self._held, self._unread = "", self._unread[1:]
        self._state = self._behind_list
        return True

    def _behind_comma(self) -> bool:
        if not self._skip_blanks():
            return False
        ends = self._unread[0] == self._form.suffix
        self._state = self._behind_arguments if ends else self._head
        return True

    def _behind_list(self) -> bool:
        """What ends it, which a list without an opener has not; then another list may follow."""
        if not self._skip_blanks():
            return False
        closer, unread = self._form.closer, self._unread
        if closer.startswith(unread) and closer != unread:
            return False
        self._state = self._beginning
        if unread.startswith(closer):
            self._held, self._unread = "", unread[len(closer) :]
            self._state = self._beginning if self._marked else self._text
        return True
