"""Which parser reads the thoughts of a format."""

from __future__ import annotations

from serving.text.answer_pieces import AnswerParser
from serving.text.reasoning.formats import MARKS, ReasoningName
from serving.text.reasoning.harmony import HarmonyParser
from serving.text.reasoning.mark_parser import MarkParser


def thought_parser(name: ReasoningName, *, inside: bool) -> AnswerParser:
    """`inside`: the prompt has begun a thought."""
    if name == "gpt_oss":
        return HarmonyParser(reads_calls=False)
    return MarkParser(MARKS[name], inside=inside)
