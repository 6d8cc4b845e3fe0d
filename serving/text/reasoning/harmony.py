"""Reads GPT-OSS's answers, which are messages in channels ("harmony"), from text that arrives in pieces.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Thoughts are in the channel `analysis`, calls are messages to a function, everything else is content. The prompt ends
with `<|start|>assistant`. Text outside messages is also content; marks are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from serving.text.answer_pieces import CallPiece, Piece, overlap
from serving.text.reasoning.formats import HARMONY_TOKENS
from serving.text.state_parser import SPACE, StateParser
from serving.text.tool_calls.json_extent import JsonExtent

_GAP = f"[{SPACE}]*"
_HEADER = re.compile(
    rf"(?:<\|start\|>)?{_GAP}(?:assistant)?(?:{_GAP}to=[^\s<]+)?{_GAP}"
    rf"<\|channel\|>{_GAP}\w+(?:{_GAP}to=[^\s<]+)?{_GAP}(?:(?:<\|constrain\|>)?{_GAP}\w+)?{_GAP}<\|message\|>"
    rf"|<\|start\|>{_GAP}(?:assistant)?{_GAP}<\|message\|>"
)
_HEADER_SO_FAR = re.compile(
    rf"(?:<\|start\|>{_GAP}(?:assistant)?(?:{_GAP}to=[^\s<]+)?{_GAP})?"
    rf"(?:<\|channel\|>{_GAP}\w*(?:{_GAP}to=[^\s<]*)?{_GAP}(?:(?:<\|constrain\|>)?{_GAP}\w*)?{_GAP})?"
    rf"|<\|start\|>{_GAP}(?:{'|'.join('assistant'[:end] for end in range(10))}|(?:assistant)?{_GAP}to=[^\s<]*)"
)
"""What remains of a header in an answer that was cut off within it, except for a mark."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_MESSAGE = "<|message|>"
_BEGINNINGS = ("<|start|>", "<|channel|>", "to=", "assistant<|channel|>", "assistant to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_WAITED_FOR = (*_BEGINNINGS, *_ENDS, "<|message|>")
_OPENING_MARKS = ("<|start|>", "<|channel|>", _MESSAGE)
_MARKS = (*_ENDS, *_OPENING_MARKS)
_MARK = re.compile("|".join(re.escape(mark) for mark in (*_ENDS, "<|start|>", "<|channel|>")))
_MAX_HEADER_CHARS = 512
_BETWEEN = "\n"
"""Separates two messages of the same kind."""


class HarmonyParser(StateParser):
    """An AnswerParser of thoughts, calls and content. Without `reads_calls`, calls are content, including their
    marks."""

    def __init__(self, *, reads_calls: bool) -> None:
        super().__init__(self._between)
        self._reads_calls = reads_calls
        self._num_calls = 0
        self._extent = JsonExtent()
        """Of the arguments of the latest call."""
        self._in_arguments = False
        """The latest call's arguments have not ended."""
        self._broken_off = False
        """A call before the latest has ended before its arguments had."""
        self._told: set[str] = set()
        """Kinds of messages that there have been."""
        self._tell: Callable[[str], None] = self._say
        """Takes the text of the current message."""
        self._shows_marks = False

    def flush(self) -> list[Piece]:
        rest, self._unread = self._unread, ""
        if self._state == self._body:
            self._tell(rest)
        elif not _is_header_so_far(rest):
            self._say(rest)
        return self._take()

    @property
    def is_broken_off(self) -> bool:
        return self._broken_off or self._in_arguments

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(CallPiece(self._num_calls - 1, None, text))
            self._in_arguments = self._in_arguments and self._extent.end(text) is None

    def _between(self) -> bool:
        """A header, or text without one."""
        begun = self._unread.lstrip(SPACE)
        if not begun or any(word.startswith(begun) and word != begun for word in _WAITED_FOR):
            return False
        if begun.startswith(_ENDS):
            mark = next(mark for mark in _ENDS if begun.startswith(mark))
            self._unread = begun[len(mark) :]
            return bool(self._unread)
        place = begun.find(_MESSAGE, 0, _MAX_HEADER_CHARS)
        if place < 0 and begun.startswith(_BEGINNINGS) and _may_be_header(begun):
            return False
        header = begun[: place + len(_MESSAGE)] if place >= 0 else ""
        if _HEADER.fullmatch(header):
            self._unread = begun[len(header) :]
            self._begin(header)
        else:
            mark = next((mark for mark in _OPENING_MARKS if begun.startswith(mark)), "")
            if mark:
                self._unread = begun[len(mark) :]
            self._begin_content("")
        self._state = self._body
        return True

    def _begin(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        if recipient and recipient[1].startswith(_FUNCTIONS) and name and self._reads_calls:
            self._pieces.append(CallPiece(self._num_calls, name, ""))
            self._num_calls += 1
            self._broken_off = self.is_broken_off
            self._in_arguments, self._extent = True, JsonExtent()
            self._tell, self._shows_marks = self._argue, False
        elif recipient and recipient[1].startswith(_FUNCTIONS):
            self._begin_content(header)
        elif channel and channel[1] == "analysis":
            self._tell, self._shows_marks = self._think, False
            self._think(self._gap("thought"))
        else:
            self._begin_content("")

    def _begin_content(self, header: str) -> None:
        self._tell, self._shows_marks = self._say, bool(header)
        self._say(self._gap("content") + header)

    def _gap(self, kind: str) -> str:
        gap = _BETWEEN if kind in self._told else ""
        self._told.add(kind)
        return gap

    def _body(self) -> bool:
        """The text of a message, up to a mark that ends it or begins the next one."""
        unread = self._unread
        mark = _MARK.search(unread)
        if mark is None:
            end = len(unread) - overlap(unread, _MARKS)
            self._tell(self._read(end))
            return False
        end = mark.end() if mark[0] in _ENDS else mark.start()
        self._tell(unread[: end if self._shows_marks else mark.start()])
        self._unread = unread[end:]
        self._state = self._between
        return True


def _may_be_header(text: str) -> bool:
    """Whether the text may still become a header: no mark has ended it, and it is not too long."""
    return len(text) < _MAX_HEADER_CHARS and not any(mark in text for mark in _ENDS)


def _is_header_so_far(text: str) -> bool:
    """Whether the answer was cut off within a header, which has no text."""
    begun = text.strip(SPACE)
    without_mark = begun[: len(begun) - overlap(begun, HARMONY_TOKENS)].rstrip(SPACE)
    return len(begun) < _MAX_HEADER_CHARS and any(map(_HEADER_SO_FAR.fullmatch, (begun, without_mark)))
