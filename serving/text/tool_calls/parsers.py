"""Which parser reads the calls of a format."""

from __future__ import annotations

from serving.text.answer_pieces import AnswerParser
from serving.text.tool_calls.formats import FormatName, NamedFormat, tool_format
from serving.text.tool_calls.named_parser import NamedCallParser
from serving.text.tool_calls.parser import CallParser


def call_parser(name: FormatName) -> AnswerParser:
    form = tool_format(name)
    return NamedCallParser(form) if isinstance(form, NamedFormat) else CallParser(form)
