"""What the tools of a chat request ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.front.api.errors import refusal
from serving.front.api.fields import MAX_GRAMMAR_CHARS, JsonSchema, check_grammar_len
from serving.front.api.openai.structured import ANY_OBJECT, HeldAnswer
from serving.front.api.openai.tools_schema import (
    AllowedToolsChoice,
    Function,
    NamedTool,
    Tool,
    ToolChoice,
)
from serving.text.tool_calls.formats import FormatName, tool_format
from serving.wire.turns import ModelInfo, OutputConstraint


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. `reads`: calls in its answers are told as such. An answer that is held to calls calls
    only functions that are `callable_names`, if there are any. `strict_where_possible`: so is a function that does not
    say whether it is."""

    tools: Sequence[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool
    parallel: bool
    format_name: FormatName
    callable_names: frozenset[str] = frozenset()
    strict_where_possible: bool = False

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

    def strict_calls(self, model: ModelInfo, constraint: OutputConstraint | None) -> str | None:
        """What calls in a free answer are held to (TurnCall.strict_calls); None if no function is strict, or the answer
        is held already. Functions that are not strict have any arguments."""
        if self.choice != "auto" or constraint is not None:
            return None
        must = [tool.function.strict is True for tool in self.tools]
        source = self._strict_source(model, [self._is_strict(tool.function) for tool in self.tools], must)
        if source is not None and len(source) > MAX_GRAMMAR_CHARS:
            source = self._strict_source(model, must, must)
        if source is not None:
            check_grammar_len(source, "tools")
        return source

    def _strict_source(self, model: ModelInfo, strict: list[bool], must: list[bool]) -> str | None:
        if not any(strict):
            return None
        functions = [
            {
                "name": tool.function.name,
                "parameters": tool.function.arguments_schema if is_strict else ANY_OBJECT,
                "must": is_must,
            }
            for tool, is_strict, is_must in zip(self.tools, strict, must, strict=True)
        ]
        wanted = {"format": self.format_name, "reasoning": model.reasoning, "functions": functions}
        return json.dumps(wanted, ensure_ascii=False, separators=(",", ":"))

    def _is_strict(self, function: Function) -> bool:
        return self.strict_where_possible if function.strict is None else function.strict

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
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    model: ModelInfo,
    *,
    strict_where_possible: bool = False,
) -> ToolUse | None:
    """None without tools. `strict_where_possible` as in ToolUse. Raises ServiceError, which names the field."""
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
        return ToolUse(
            tools,
            choice or "auto",
            not one_by_one,
            model.tool_calls,
            strict_where_possible=strict_where_possible,
        )
    allowed = choice.allowed_tools
    for index, named in enumerate(allowed.tools):
        _check_name(named, names, f"tool_choice.allowed_tools.tools[{index}]")
    allowed_names = frozenset(named.function.name for named in allowed.tools)
    if allowed.mode == "auto":
        # Nothing holds a free answer to some of the tools: the model is not told of the others.
        tools = [tool for tool in tools if tool.function.name in allowed_names]
    return ToolUse(
        tools,
        allowed.mode,
        not one_by_one,
        model.tool_calls,
        allowed_names,
        strict_where_possible=strict_where_possible,
    )


def _check_name(tool: NamedTool, names: set[str], param: str) -> None:
    if tool.function.name not in names:
        param = f"{param}.function.name"
        raise refusal(f"{param}: no tool has the name {tool.function.name[:120]!r}.", param)
