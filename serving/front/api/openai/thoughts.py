"""What an answer is held to, and when its calls and thoughts are told apart from what it says."""

from __future__ import annotations

from typing import Any

from serving.front.api.openai.structured import HeldAnswer
from serving.front.api.openai.tools import ToolUse
from serving.text.reasoning.formats import ReasoningName, shown_tokens
from serving.wire.turns import ModelInfo, OutputConstraint


def reads_thoughts(model: ModelInfo, constraint: OutputConstraint | None) -> ReasoningName | None:
    """The format in which the answer's thoughts are looked for. An answer that is held to something has none."""
    return None if constraint is not None else model.reasoning


def constraint_of(held: HeldAnswer | None, tools: ToolUse | None) -> OutputConstraint | None:
    """Raises ServiceError, which names the field."""
    if tools is not None:
        return tools.constraint(held)
    return None if held is None else held.constraint


def answer_fields(model: ModelInfo, held: HeldAnswer | None, tools: ToolUse | None) -> dict[str, Any]:
    """Fields of a TurnCall: what holds its answer, and the special tokens that are part of its text, since they tell
    calls and thoughts. Raises ServiceError, which names the field."""
    constraint = constraint_of(held, tools)
    of_calls = () if tools is None else tools.shown_tokens
    reasoning = reads_thoughts(model, constraint)
    return {
        "constraint": constraint,
        "strict_calls": None if tools is None else tools.strict_calls(model, constraint),
        "shown_tokens": of_calls if reasoning is None else (*of_calls, *shown_tokens(reasoning)),
    }
