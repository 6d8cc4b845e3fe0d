"""When an answer's thoughts are told apart from what it says."""

from __future__ import annotations

from serving.front.api.openai.tools import ToolUse
from serving.text.reasoning.formats import ReasoningName, shown_tokens
from serving.wire.turns import ModelInfo, OutputConstraint


def reads_thoughts(model: ModelInfo, constraint: OutputConstraint | None) -> ReasoningName | None:
    """The format in which the answer's thoughts are looked for. An answer that is held to something has none."""
    return None if constraint is not None else model.reasoning


def telling_tokens(tools: ToolUse | None, reasoning: ReasoningName | None) -> tuple[str, ...]:
    """Special tokens that are part of an answer's text, since they tell calls and thoughts."""
    of_calls = () if tools is None else tools.shown_tokens
    return of_calls if reasoning is None else (*of_calls, *shown_tokens(reasoning))
