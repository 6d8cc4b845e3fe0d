"""Answers with function calls for Hypothesis, made of pieces; and what a parser reports of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from serving.text.answer_pieces import AnswerParser, CallPiece, Piece, Thought
from serving.text.tool_calls.formats import JSON_FORMATS, FormatName
from serving.text.tool_calls.json_parser import JsonCallParser

SCRAPS: dict[FormatName, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "_call>", "<tool_call>\n", "\n</tool_call>"],
    "llama3": ["<|python_tag|>", "<|python", ";", "; ", '{"name": "f", "parameters": {"a": 1}}'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_", "[", "]", ", ", '[TOOL_CALLS][{"name": "f", "arguments": {}}'],
}
COMMON = [
    *'{}"\\ \n,:a<',
    '{"name": "f", "arguments": {',
    '{"name": "get_weather", "arguments": {"city": "Bern"}}',
    '{"arguments": {"n": [1, {"m": "}"}]}, "name": "g"}',
    '{"name": "h", "parameters": {"text": "a \\"quoted\\" </tool_call> \\\\"}}',
    '{"name": "k"}',
    "words",
    "😀",
]


def texts(name: FormatName) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(SCRAPS[name] + COMMON), max_size=12).map("".join)


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def read(parser: AnswerParser, *parts: str) -> list[Piece]:
    """What the parser reports of an answer, with neighbours of a kind joined."""
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)] + parser.flush()
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + piece.text)
        elif isinstance(piece, CallPiece) and isinstance(last, CallPiece) and piece.name is None:
            assert piece.index == last.index
            joined[-1] = replace(last, arguments=last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return joined


def read_json_calls(name: FormatName, *parts: str) -> list[Piece]:
    """The same for a format whose calls are JSON objects."""
    return read(JsonCallParser(JSON_FORMATS[name]), *parts)
