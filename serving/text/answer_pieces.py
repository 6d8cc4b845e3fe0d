"""What the text of an answer is found to be made of: content, thoughts and function calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import AnyStr, Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Of the answer's `index`-th call: its first piece has the name, all of them together the arguments, as JSON. That
    first piece also has the call's id, where the model has written one."""

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thought before its answer, as far as it has come."""

    text: str


Piece = str | CallPiece | Thought
"""Content comes as strings."""


class AnswerParser(Protocol):
    """Follows one answer. What comes out depends on the text alone, never on how it was cut, and is not taken back."""

    def push(self, text: str) -> list[Piece]:
        """What can be told by now."""

    def flush(self) -> list[Piece]:
        """The answer has ended: what is left."""


def overlap(text: AnyStr, words: Iterable[AnyStr]) -> int:
    """How many characters (or bytes) at the end of the text may be the beginning of a word, the longest first."""
    return max((_overlap(text, word) for word in words), default=0)


def _overlap(text: AnyStr, word: AnyStr) -> int:
    most = min(len(text), len(word) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(word[:length])), 0)
