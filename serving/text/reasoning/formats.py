"""The formats in which models write their thoughts before the answer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ReasoningName = Literal["think", "magistral", "gpt_oss"]
ReasoningSetting = Literal["auto", "off", ReasoningName]


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks around a thought at the beginning of an answer."""

    opener: str
    closer: str


MARKS = MappingProxyType(
    {
        "think": ThinkingMarks("<think>", "</think>"),
        "magistral": ThinkingMarks("[THINK]", "[/THINK]"),
    }
)
"""The marks of Qwen, DeepSeek and GLM, and those of Mistral. GPT-OSS uses channels instead (harmony.py)."""

OPENER_TOKENS = 16
"""The most tokens that an opener takes, with the white space after it."""

HARMONY_TOKENS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)


def reasoning_of(template: str) -> ReasoningName | None:
    """The format that a chat template uses; None if it uses none."""
    if "<|channel|>" in template:
        return "gpt_oss"
    for name in ("magistral", "think"):
        if MARKS[name].opener in template or MARKS[name].closer in template:
            return name
    return None


def shown_tokens(name: ReasoningName) -> tuple[str, ...]:
    """Special tokens that are kept in an answer's text, since they mark its thoughts."""
    if name == "gpt_oss":
        return HARMONY_TOKENS
    return (MARKS[name].opener, MARKS[name].closer)


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends with the beginning of a thought, which the answer continues."""
    return prompt.rstrip().endswith(tuple(marks.opener for marks in MARKS.values()))
