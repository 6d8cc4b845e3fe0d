"""The formats in which models write what they think before they answer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ReasoningName = Literal["think", "magistral", "gpt_oss"]
ReasoningSetting = Literal["auto", "off", "think", "magistral", "gpt_oss"]


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Between them a model thinks, at the beginning of its answer."""

    opener: str
    closer: str


MARKS = MappingProxyType(
    {
        "think": ThinkingMarks("<think>", "</think>"),
        "magistral": ThinkingMarks("[THINK]", "[/THINK]"),
    }
)
"""Those of Qwen, DeepSeek and GLM, and those of Mistral. GPT-OSS has channels instead (harmony.py)."""

OPENER_TOKENS = 16
"""An opener, with the white space behind it, takes no more."""

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
    """The format that a chat template knows; None if it knows none."""
    if "<|channel|>" in template:
        return "gpt_oss"
    for name in ("magistral", "think"):
        if MARKS[name].opener in template or MARKS[name].closer in template:
            return name
    return None


def shown_tokens(name: ReasoningName) -> tuple[str, ...]:
    """Special tokens that are part of an answer's text, since they tell its thoughts."""
    if name == "gpt_oss":
        return HARMONY_TOKENS
    return (MARKS[name].opener, MARKS[name].closer)


def opens_thought(prompt: str) -> bool:
    """Whether the end of a rendered prompt has begun a thought, which the answer goes on with."""
    return prompt.rstrip().endswith(tuple(marks.opener for marks in MARKS.values()))
