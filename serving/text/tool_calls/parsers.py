"""Which parser reads the calls of a format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.text.answer_pieces import AnswerParser
from serving.text.tool_calls.formats import FormatName, NamedFormat, TaggedFormat, tool_format
from serving.text.tool_calls.named_parser import NamedCallParser
from serving.text.tool_calls.parser import CallParser
from serving.text.tool_calls.tagged_parser import TaggedCallParser


def call_parser(name: FormatName, schemas: Mapping[str, Mapping[str, Any]]) -> AnswerParser:
    """`schemas` are those of the functions' parameters, by the functions' names."""
    match tool_format(name):
        case NamedFormat() as form:
            return NamedCallParser(form)
        case TaggedFormat() as form:
            return TaggedCallParser(form, schemas)
        case form:
            return CallParser(form)
