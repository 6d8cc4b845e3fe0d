"""Finds what a model thinks between two marks at the beginning of its answer, which arrives in pieces.

Line ends next to the marks belong neither to the thought nor to the answer, because chat templates that write both
again add them. An answer that does not begin with a thought is all content.
"""

from __future__ import annotations

from serving.text.answer_pieces import Piece
from serving.text.reasoning.formats import ThinkingMarks
from serving.text.state_parser import SPACE, StateParser, first_mark

_LINE_ENDS = "\r\n"


class MarkParser(StateParser):
    """An AnswerParser of thoughts and content. `inside`: the prompt has opened the thought. If the model opens it
    again, that opener is dropped."""

    def __init__(self, marks: ThinkingMarks, *, inside: bool) -> None:
        super().__init__(self._beginning)
        self._marks = marks
        self._inside = inside

    def flush(self) -> list[Piece]:
        rest, self._unread = self._unread, ""
        if self._state == self._beginning and self._inside:
            self._think(rest.strip(_LINE_ENDS))
        elif self._state == self._thought:
            self._think(rest.rstrip(_LINE_ENDS))
        elif rest and self._state != self._behind:
            self._pieces.append(rest)
        return self._take()

    @property
    def is_broken_off(self) -> bool:
        """There are no calls."""
        return False

    def _beginning(self) -> bool:
        begun, opener = self._unread.lstrip(SPACE), self._marks.opener
        if opener.startswith(begun) and begun != opener:
            return False
        if begun.startswith(opener):
            self._unread = begun[len(opener) :]
        elif not self._inside:
            self._state = self._content
            return True
        self._state = self._thought_begins
        self._inside = True
        return True

    def _thought_begins(self) -> bool:
        self._unread = self._unread.lstrip(_LINE_ENDS)
        if self._unread:
            self._state = self._thought
        return bool(self._unread)

    def _thought(self) -> bool:
        """Up to the closer. Line ends are held back, because those before the closer are dropped."""
        place, closer = first_mark(self._unread, (self._marks.closer,))
        thought = self._unread[:place].rstrip(_LINE_ENDS)
        self._think(thought)
        if not closer:
            self._read(len(thought))
            return False
        self._read(place + len(closer))
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        self._unread = self._unread.lstrip(_LINE_ENDS)
        if self._unread:
            self._state = self._content
        return bool(self._unread)

    def _content(self) -> bool:
        self._pieces.append(self._read(None))
        return False
