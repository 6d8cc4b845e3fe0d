"""Finds function calls that are a list of Python calls, in an answer that arrives in pieces.

A call begins when its name has been read, with the name of its first argument or the end of the call. An argument is
returned when it is whole; an argument without a name is dropped.
"""

from __future__ import annotations

import re

from serving.text.state_parser import SPACE
from serving.text.tool_calls.call_parser import CallParser
from serving.text.tool_calls.formats import PythonicFormat
from serving.text.tool_calls.python_literals import ArgumentExtent, literal_json

_MAX_HEAD_CHARS = 1024
"""The most characters of a function's name with that of its first argument, or of an argument's name."""
_HEAD = re.compile(r"\s*([\w.:/\-]+)\(\s*(?:(?=\))|(?=[\w.\-]+\s*=[^=]))")
_HEAD_SO_FAR = re.compile(r"\s*(?:[\w.:/\-]+(?:\(\s*(?:[\w.\-]+\s*=?)?)?)?")
_KEY = re.compile(r"([\w.\-]+)\s*=(?=[^=])")
_KEY_SO_FAR = re.compile(r"[\w.\-]+\s*=?")


class PythonicCallParser(CallParser):
    """An AnswerParser of calls and content."""

    def __init__(self, form: PythonicFormat) -> None:
        super().__init__((form.opener,), self._beginning)
        self._form = form
        self._key: str | None = None
        self._value = ""
        self._extent = ArgumentExtent()
        self._marked = False
        """The list follows an opener."""

    def _is_of_calls(self, rest: str) -> bool:
        in_call = self._state in (self._argument, self._argument_value)
        return in_call or rest in ("", ",") or self._form.closer.startswith(rest)

    def _beginning(self) -> bool:
        """A place where a list needs no opener."""
        if not self._skip_blanks():
            return False
        opener = self._form.opener
        if self._unread[0] == self._form.prefix:
            self._hold(1)
            self._marked = False
            self._state = self._head
            return True
        if self._unread.startswith(opener):
            return self._at_opener()
        if opener.startswith(self._unread):
            return False
        return self._leave()

    def _at_opener(self) -> bool:
        self._hold(len(self._form.opener))
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
        """In a list, where a call must begin."""
        unread = self._unread
        head = _HEAD.match(unread, 0, _MAX_HEAD_CHARS)
        if head is None:
            if len(unread) < _MAX_HEAD_CHARS and _HEAD_SO_FAR.fullmatch(unread):
                return False
            return self._leave()
        self._begin_call(head[1])
        self._read(head.end())
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Where an argument may begin, or the call ends. The end of the list also ends a call."""
        self._unread = self._unread.lstrip(SPACE)
        if not self._unread:
            return False
        if self._unread[0] == ",":
            self._read(1)
            return True
        if self._unread[0] in (self._form.tail, self._form.suffix):
            self._unread = self._unread.removeprefix(self._form.tail)
            self._end_named_arguments()
            self._state = self._behind_arguments
            return True
        key = _KEY.match(self._unread, 0, _MAX_HEAD_CHARS)
        if key is None and len(self._unread) < _MAX_HEAD_CHARS and _KEY_SO_FAR.fullmatch(self._unread):
            return False
        self._key = None if key is None else key[1]
        self._read(key.end() if key else 0)
        self._value, self._extent = "", ArgumentExtent()
        self._state = self._argument_value
        return True

    def _argument_value(self) -> bool:
        end = self._extent.end(self._unread)
        self._value += self._read(end)
        if end is None:
            return False
        if self._key is not None:
            self._argue_key(self._key, literal_json(self._value))
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
        """The closer, which a list without an opener does not have; then another list may follow."""
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
