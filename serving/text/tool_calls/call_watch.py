"""Finds where calls begin in a free answer, token by token, before their arguments begin.

In an answer without calls, most tokens cost only a set look-up. The result depends on the tokens alone. A call inside a
thought does not count, as for the parsers that read the answer.

A token is represented by the bytes that it adds to the text. A special token is its name between bytes that no text
has. So if a model has a special token for a mark, the same mark written in other tokens does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.text.answer_pieces import overlap
from serving.text.reasoning.formats import MARKS, ReasoningName
from serving.text.tool_calls.openings import CallOpening

_SPACE = b" \t\r\n"
_MAX_OPENING_BYTES = 192
"""A call must begin within this many bytes after a mark."""
_MAX_FIRST_BYTES = 256
"""The same where an answer begins with a call that has no mark."""


@dataclass(frozen=True, slots=True)
class WatchedOpening:
    """How calls begin in the tokens of one vocabulary. `call` matches a whole opening, `mark` what it may begin with,
    `first` (None: nothing) a call at the beginning of the answer. Only `loud` tokens can begin a mark or a mark of a
    thought.

    `thought` has the opener and the closer of a thought, if the model thinks.
    """

    token_bytes: Callable[[int], bytes]
    special: Mapping[int, bytes]
    loud: frozenset[int]
    marks: tuple[bytes, ...]
    mark: re.Pattern[bytes]
    call: re.Pattern[bytes]
    first: re.Pattern[bytes] | None
    first_bytes: bytes
    thought: tuple[bytes, bytes] | None

    def bytes_of(self, token_id: int) -> bytes:
        return self.special.get(token_id) or self.token_bytes(token_id)


def watched_opening(
    opening: CallOpening,
    names: Sequence[str],
    reasoning: ReasoningName | None,
    special_ids: Mapping[str, int],
    vocab_size: int,
    token_bytes: Callable[[int], bytes],
) -> WatchedOpening:
    """Reads all tokens of the vocabulary. `names` are those of the functions."""
    special = {token_id: _special(text) for text, token_id in special_ids.items()}

    names_of_tokens = "|".join(map(re.escape, special_ids))

    def written(text: str) -> bytes:
        parts = re.split(f"({names_of_tokens})", text) if special_ids else [text]
        return b"".join(_special(part) if part in special_ids else part.encode() for part in parts)

    marks = tuple(written(mark) for mark in opening.marks)
    calls = [
        re.escape(mark) + behind
        for mark, text in zip(marks, opening.marks, strict=True)
        for behind in opening.behind(text)
    ]
    thinks = None
    if reasoning is not None and reasoning in MARKS:
        thought = MARKS[reasoning]
        thinks = (written(thought.opener), written(thought.closer))
    begins = {mark[:1] for mark in (*marks, *(thinks or ()))}
    loud = re.compile(b"[" + b"".join(map(re.escape, begins)) + b"]")
    first = opening.first([name.encode() for name in names])
    return WatchedOpening(
        token_bytes,
        special,
        frozenset(special) | {i for i in range(vocab_size) if loud.search(token_bytes(i))},
        marks,
        re.compile(b"|".join(map(re.escape, marks)) or b"(?!)"),
        re.compile(b"|".join(calls) or b"(?!)"),
        None if first is None else re.compile(first),
        opening.first_bytes,
        thinks,
    )


class CallWatch:
    """Follows one answer. `in_thought`: the prompt has begun a thought."""

    def __init__(self, opening: WatchedOpening, *, in_thought: bool = False) -> None:
        self._opening = opening
        self._text = b""
        self._start = 0
        """Where in `_text` the unread part begins."""
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._state: Callable[[], bool] = self._answer
        if in_thought and opening.thought is not None:
            self._state = self._thought

    def push(self, token_id: int) -> list[int] | None:
        """The tokens of the opening, from the one in which it begins to this one, which completes it; None as long as
        there is no opening."""
        skims = not self._ids and self._state in (self._content, self._thought)
        if skims and token_id not in self._opening.loud:
            return None
        self._text += self._opening.bytes_of(token_id)
        self._ids.append(token_id)
        self._ends.append(len(self._text))
        while self._state():
            pass
        if self._state != self._found:
            return None
        ids = self._ids
        self._forget(len(self._text))
        self._state = self._content
        return ids

    def behind_call(self) -> None:
        """The next token follows a whole call."""
        self._state = self._beginning

    def _forget(self, start: int) -> None:
        """Drops the text before `start`, and the tokens that lie in it."""
        self._start = start
        count = next((n for n, end in enumerate(self._ends) if end > start), len(self._ends))
        if count:
            gone = self._ends[count - 1]
            self._ids, self._text, self._start = self._ids[count:], self._text[gone:], start - gone
            self._ends = [end - gone for end in self._ends[count:]]

    def _answer(self) -> bool:
        """Whether the answer begins with a thought."""
        begun = self._text[self._start :].lstrip(_SPACE)
        opener = b"" if self._opening.thought is None else self._opening.thought[0]
        if opener.startswith(begun) and begun != opener:
            return False
        thinks = bool(opener) and begun.startswith(opener)
        self._state = self._thought if thinks else self._beginning
        return True

    def _thought(self) -> bool:
        assert self._opening.thought is not None
        closer = self._opening.thought[1]
        place = self._text.find(closer, self._start)
        if place < 0:
            self._forget(len(self._text) - overlap(self._text, [closer]))
            return False
        self._forget(place + len(closer))
        self._state = self._beginning
        return True

    def _beginning(self) -> bool:
        """A place where a call needs no mark."""
        first = self._opening.first
        if first is None:
            self._state = self._content
            return True
        begun = self._text[self._start :].lstrip(_SPACE)
        if first.match(self._text, self._start):
            self._state = self._found
            return False
        may_be_one = begun[:1] in self._opening.first_bytes and len(begun) <= _MAX_FIRST_BYTES
        if may_be_one and self._opening.mark.search(self._text, self._start) is None:
            return False
        self._state = self._content
        return True

    def _content(self) -> bool:
        call = self._opening.call.search(self._text, self._start)
        if call is not None:
            self._forget(call.start())
            self._state = self._found
            return False
        end = len(self._text)
        marks = (found.start() for found in self._opening.mark.finditer(self._text, self._start))
        unsettled = (place for place in marks if end - place <= _MAX_OPENING_BYTES)
        self._forget(next(unsettled, end - overlap(self._text, self._opening.marks)))
        return False

    def _found(self) -> bool:
        return False


def _special(text: str) -> bytes:
    return b"\xff" + text.encode() + b"\xff"
