"""What the tools of a chat request ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.front.api.errors import refusal
from serving.front.api.fields import JsonSchema, check_grammar_len
from serving.front.api.openai_structured import HeldAnswer
from serving.front.api.openai_tools_schema import AllowedToolsChoice, NamedTool, Tool, ToolChoice
from serving.text.tool_calls.formats import FormatName, tool_format
from serving.wire.turns import ModelInfo, OutputConstraint


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. `reads`: calls in its answers are told as such. An answer that is held to calls calls
    only functions that are `callable_names`, if there are any."""

    tools: Sequence[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool
    parallel: bool
    format_name: FormatName
    callable_names: frozenset[str] = frozenset()

    @property
    def reads(self) -> bool:
        return self.choice != "none"

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that are part of an answer's text, since they tell calls."""
        return tool_format(self.format_name).shown_tokens if self.reads else ()

    @property
    def schemas(self) -> dict[str, JsonSchema]:
        """Those of the functions' parameters, by the functions' names."""
        return {tool.function.name: tool.function.arguments_schema for tool in self.tools}

    def for_template(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.for_template() for tool in self.tools)

    def constraint(self, answer: HeldAnswer | None) -> OutputConstraint | None:
        """What holds the answer to calls, or, where the model may choose, to calls or to the schema of `answer`."""
        if self.choice == "none" or (self.choice == "auto" and answer is None):
            return None if answer is None else answer.constraint
        if answer is not None and (self.choice != "auto" or answer.constraint.kind != "json_schema"):
            reason = (
                "tool_choice already says what the answer must be"
                if self.choice != "auto"
                else "beside tools only JSON can be enforced"
            )
            param = answer.field.partition(".")[0]
            raise refusal(f"{param}: {reason}.", param)
        named = self.choice.function.name if isinstance(self.choice, NamedTool) else None
        functions = [
            {"name": tool.function.name, "parameters": tool.function.arguments_schema}
            for tool in self.tools
            if named in (None, tool.function.name)
            and (not self.callable_names or tool.function.name in self.callable_names)
        ]
        wanted = {
            "format": self.format_name,
            "functions": functions,
            "parallel": self.parallel and named is None,
            "answer": None if answer is None else json.loads(answer.constraint.source),
        }
        source = json.dumps(wanted, ensure_ascii=False, separators=(",", ":"))
        check_grammar_len(source, "tools")
        return OutputConstraint("tool_calls", source)


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None, model: ModelInfo
) -> ToolUse | None:
    """None without tools. Raises ServiceError, which names the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refusal("tool_choice: there are no tools to choose from.", "tool_choice")
        return None
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            param = f"tools[{index}].function.name"
            raise refusal(f"{param}: there are two functions {tool.function.name!r}.", param)
        names.add(tool.function.name)
    if isinstance(choice, NamedTool):
        _check_name(choice, names, "tool_choice")
    if model.tool_calls is None:
        raise refusal(
            "tools: this model's chat template has none, or in a format that is not known here; the setting "
            "model.tool_calls names one.",
            "tools",
            code="unsupported_field",
        )
    one_by_one = parallel is False
    if not isinstance(choice, AllowedToolsChoice):
        return ToolUse(tools, choice or "auto", not one_by_one, model.tool_calls)
    allowed = choice.allowed_tools
    for index, named in enumerate(allowed.tools):
        _check_name(named, names, f"tool_choice.allowed_tools.tools[{index}]")
    allowed_names = frozenset(named.function.name for named in allowed.tools)
    if allowed.mode == "auto":
        # Nothing holds a free answer to some of the tools: the model is not told of the others.
        tools = [tool for tool in tools if tool.function.name in allowed_names]
    return ToolUse(tools, allowed.mode, not one_by_one, model.tool_calls, allowed_names)


def _check_name(tool: NamedTool, names: set[str], param: str) -> None:
    if tool.function.name not in names:
        param = f"{param}.function.name"
        raise refusal(f"{param}: no tool has the name {tool.function.name[:120]!r}.", param)
