"""The pieces that the text of an answer is split into: content, thoughts and function calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import AnyStr, Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of the answer's `index`-th call. The first piece of a call has the name, and the call's id if the model
    has written one. All pieces together have the arguments, as JSON."""

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thought before its answer."""

    text: str


Piece = str | CallPiece | Thought
"""A piece of an answer; content is a string."""


class AnswerParser(Protocol):
    """Follows one answer. The pieces depend on the text alone, never on how it was cut, and are never taken back."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain by now."""

    def flush(self) -> list[Piece]:
        """The answer has ended: returns the remaining pieces."""

    @property
    def is_broken_off(self) -> bool:
        """Whether a call of the answer has ended before its arguments had. To be read after `flush`."""


def overlap(text: AnyStr, words: Iterable[AnyStr]) -> int:
    """How many characters (or bytes) at the end of the text may be the beginning of one of the words: the longest such
    end."""
    return max((_overlap(text, word) for word in words), default=0)


def _overlap(text: AnyStr, word: AnyStr) -> int:
    most = min(len(text), len(word) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(word[:length])), 0)
