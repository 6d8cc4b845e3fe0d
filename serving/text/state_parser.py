"""What all parsers of answers have in common: they hold back text until it is known what it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from serving.text.answer_pieces import Piece, overlap

SPACE = " \t\r\n"


class StateParser(ABC):
    """An AnswerParser that is in a state. A state looks at `_unread`, takes from it what it knows, and says whether
    that is to go on: not if more text has to come first. What a state leaves there comes to the next one."""

    def __init__(self, begin: Callable[[], bool]) -> None:
        self._unread = ""
        self._pieces: list[Piece] = []
        self._state = begin

    def push(self, text: str) -> list[Piece]:
        """What can be told by now."""
        self._unread += text
        while self._unread and self._state():
            pass
        return self._take()

    @abstractmethod
    def flush(self) -> list[Piece]:
        """The answer has ended: what is left."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self, end: int | None) -> str:
        """The text up to that place; None: all that is there."""
        read = self._unread[:end]
        self._unread = self._unread[len(read) :]
        return read


def first_mark(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks is, and which, the longest where several are. Without one, where one may begin at
    the end of the text, and ""."""
    places = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return len(text) - overlap(text, marks), ""
    place, _, mark = min(places)
    return place, mark
