"""The common part of all parsers of function calls.

The pieces depend on the text alone, never on how it was cut, and are never taken back. Text that is not a call is
content.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable

from serving.text.answer_pieces import CallPiece, Piece
from serving.text.state_parser import SPACE, StateParser, first_mark
from serving.text.tool_calls.json_extent import JsonExtent

MAX_NAME_CHARS = 512
"""The most characters of the name of a function, or of an argument."""
NAME = re.compile(r"\s*[\w.\-:/]+\s*")
NAME_SO_FAR = re.compile(r"\s*[\w.\-:/]*\s*")


class CallParser(StateParser):
    """An AnswerParser of calls and content. `_held` was read since the end of the content, or of the call before; it is
    content unless a call follows. Calls begin with one of `openers`."""

    def __init__(self, openers: tuple[str, ...], begin: Callable[[], bool]) -> None:
        super().__init__(begin)
        self._openers = openers
        self._held = ""
        self._num_calls = 0
        self._num_arguments = 0
        """Of the current call, returned by name so far."""
        self._behind_call = False
        """A call has begun, and no content has followed it."""
        self._in_arguments = False
        """A call has begun, and its arguments have not ended."""

    def flush(self) -> list[Piece]:
        rest = f"{self._held}{self._unread}"
        if not (self._behind_call and self._is_of_calls(rest.strip(SPACE))):
            self._say(rest)
        self._held = self._unread = ""
        return self._take()

    @property
    def is_broken_off(self) -> bool:
        return self._in_arguments

    @abstractmethod
    def _is_of_calls(self, rest: str) -> bool:
        """Whether `rest`, the end of an answer after the beginning of a call, belongs to the calls and so is not
        content."""

    @abstractmethod
    def _at_opener(self) -> bool:
        """The state in which an opener is next."""

    def _text(self) -> bool:
        """Content, up to an opener. White space is held back, because white space before an opener is dropped."""
        place, mark = first_mark(self._unread, self._openers)
        self._say(self._read(len(self._unread[:place].rstrip(SPACE))))
        if mark:
            self._hold(self._unread.index(mark))
            self._state = self._at_opener
        return bool(mark)

    def _hold(self, count: int) -> None:
        self._held += self._read(count)

    def _skip_blanks(self) -> bool:
        """Skips white space. Returns whether anything follows it."""
        self._hold(len(self._unread) - len(self._unread.lstrip(SPACE)))
        return bool(self._unread)

    def _leave(self) -> bool:
        """What was held is content, and so is what follows it."""
        held, self._held = self._held, ""
        self._say(held)
        self._state = self._text
        return True

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._behind_call = False

    def _begin_call(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        self._pieces.append(CallPiece(self._num_calls, name, arguments, call_id))
        self._held, self._num_arguments, self._behind_call = "", 0, True
        self._in_arguments = True

    def _end_arguments(self) -> None:
        self._num_calls += 1
        self._in_arguments = False

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self._num_calls, None, text))

    def _argue_object(self, extent: JsonExtent, behind: Callable[[], bool]) -> bool:
        """In arguments that are a JSON object, up to the end of `extent`. `behind` is the state after them."""
        end = extent.end(self._unread)
        self._argue(self._read(end))
        if end is not None:
            self._end_arguments()
            self._state = behind
        return end is not None

    def _argue_key(self, key: str, value: str = "") -> None:
        separator = ", " if self._num_arguments else "{"
        self._argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._num_arguments += 1

    def _end_named_arguments(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._end_arguments()
