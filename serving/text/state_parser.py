"""The common part of all parsers of answers: they hold back text until it is known what it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from serving.text.answer_pieces import Piece, Thought, overlap

SPACE = " \t\r\n"


class StateParser(ABC):
    """An AnswerParser that is a state machine. A state looks at `_unread` and takes from it what it recognises. It
    returns whether to go on at once; if not, more text must come first. What a state leaves in `_unread` is read by the
    next one."""

    def __init__(self, begin: Callable[[], bool]) -> None:
        self._unread = ""
        self._pieces: list[Piece] = []
        self._state = begin

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain by now."""
        self._unread += text
        while self._unread and self._state():
            pass
        return self._take()

    @abstractmethod
    def flush(self) -> list[Piece]:
        """The answer has ended: returns the remaining pieces."""

    @property
    @abstractmethod
    def is_broken_off(self) -> bool:
        """See AnswerParser."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _think(self, text: str) -> None:
        if text:
            self._pieces.append(Thought(text))

    def _read(self, end: int | None) -> str:
        """Takes the text up to `end`; None: all of it."""
        read = self._unread[:end]
        self._unread = self._unread[len(read) :]
        return read


def first_mark(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """The place of the first of the marks, and the mark; the longest if several are there. Without one: the place where
    one may begin at the end of the text, and ""."""
    places = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return len(text) - overlap(text, marks), ""
    place, _, mark = min(places)
    return place, mark
