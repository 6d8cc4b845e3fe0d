"""Chooses the parser that reads an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.text.answer_pieces import AnswerParser, Piece
from serving.text.reasoning.formats import MARKS, ReasoningName
from serving.text.reasoning.harmony import HarmonyParser
from serving.text.reasoning.mark_parser import MarkParser
from serving.text.tool_calls.formats import FormatName, NamedFormat, PythonicFormat, TaggedFormat, tool_format
from serving.text.tool_calls.json_parser import JsonCallParser
from serving.text.tool_calls.named_parser import NamedCallParser
from serving.text.tool_calls.pythonic_parser import PythonicCallParser
from serving.text.tool_calls.tagged_parser import TaggedCallParser


def answer_parser(
    calls: FormatName | None,
    schemas: Mapping[str, Mapping[str, Any]],
    thoughts: ReasoningName | None,
    *,
    inside: bool,
) -> AnswerParser:
    """The parser for an answer with calls or thoughts in these formats. `schemas` are those of the functions'
    parameters, by function name. `inside`: the prompt has begun a thought."""
    parsers: list[AnswerParser] = []
    if thoughts is not None and calls != "gpt_oss":  # one parser reads everything in channels
        parsers.append(thought_parser(thoughts, inside=inside))
    if calls is not None:
        parsers.append(call_parser(calls, schemas))
    return parsers[0] if len(parsers) == 1 else _InTurn(parsers)


def thought_parser(name: ReasoningName, *, inside: bool) -> AnswerParser:
    """`inside`: the prompt has begun a thought."""
    if name == "gpt_oss":
        return HarmonyParser(reads_calls=False)
    return MarkParser(MARKS[name], inside=inside)


def call_parser(name: FormatName, schemas: Mapping[str, Mapping[str, Any]]) -> AnswerParser:
    """`schemas` as in answer_parser."""
    match tool_format(name):
        case NamedFormat() as form:
            return HarmonyParser(reads_calls=True) if name == "gpt_oss" else NamedCallParser(form)
        case TaggedFormat() as form:
            return TaggedCallParser(form, schemas)
        case PythonicFormat() as form:
            return PythonicCallParser(form)
        case form:
            return JsonCallParser(form)


class _InTurn:
    """An AnswerParser made of several. Each reads what is content to the parsers before it."""

    def __init__(self, parsers: list[AnswerParser]) -> None:
        self._parsers = parsers

    def push(self, text: str) -> list[Piece]:
        return self._read([text], self._parsers)

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        for place, parser in enumerate(self._parsers):
            pieces += self._read(parser.flush(), self._parsers[place + 1 :])
        return pieces

    @property
    def is_broken_off(self) -> bool:
        return any(parser.is_broken_off for parser in self._parsers)

    @staticmethod
    def _read(pieces: list[Piece], parsers: list[AnswerParser]) -> list[Piece]:
        for parser in parsers:
            pieces = [
                told
                for piece in pieces
                for told in (parser.push(piece) if isinstance(piece, str) else [piece])
            ]
        return pieces
