"""How a chat request uses tools: what the model is told of them, and what its calls are held to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.front.api.answers.held import ANY_OBJECT, HeldAnswer
from serving.front.api.answers.tools_schema import (
    AllowedToolsChoice,
    CustomTool,
    Function,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
)
from serving.front.api.errors import refusal
from serving.front.api.fields import MAX_GRAMMAR_CHARS, JsonSchema, check_grammar_len
from serving.text.tool_calls.formats import FormatName, tool_format
from serving.wire.turns import ModelInfo, OutputConstraint


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools. `format_name`: how the model writes calls; None if there are no tools. If an answer
    is held to calls, only functions in `callable_names` may be called (empty: all). `custom_names`: the custom tools.
    `strict_where_possible`: a function that does not say whether it is strict counts as strict."""

    tools: Sequence[Tool]
    choice: Literal["none", "auto", "required"] | NamedTool
    parallel: bool
    format_name: FormatName | None
    callable_names: frozenset[str] = frozenset()
    custom_names: frozenset[str] = frozenset()
    strict_where_possible: bool = False

    @property
    def read_format(self) -> FormatName | None:
        """The format in which calls are looked for in answers, to be given to the client as calls. None: they are not
        looked for."""
        return None if self.choice == "none" else self.format_name

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that stay in an answer's text because they mark calls."""
        return () if self.read_format is None else tool_format(self.read_format).shown_tokens

    @property
    def schemas(self) -> dict[str, JsonSchema]:
        """Schemas of the functions' parameters, by function name."""
        return {tool.function.name: tool.function.arguments_schema for tool in self.tools}

    def strict_calls(self, model: ModelInfo, constraint: OutputConstraint | None) -> str | None:
        """What calls in a free answer are held to (TurnCall.strict_calls); None if no function is strict, or the answer
        is not free. Functions that are not strict may have any arguments."""
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
        """What the answer is held to: to calls; or, if the model may choose, to calls or the schema of `answer`. An
        answer that must be calls has no text, which is what `answer` is about."""
        if self.choice == "none" or (self.choice == "auto" and answer is None):
            return None if answer is None else answer.constraint
        if self.choice != "auto":
            answer = None
        elif answer is not None and answer.constraint.kind != "json_schema":
            param = answer.field.partition(".")[0]
            raise refusal(f"{param}: beside tools only JSON can be enforced.", param)
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


NO_TOOLS = ToolUse((), "none", parallel=True, format_name=None)


def tool_use(
    tools: Sequence[Tool | CustomTool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    model: ModelInfo,
    *,
    strict_where_possible: bool = False,
) -> ToolUse:
    """How the request uses tools. `strict_where_possible`: see ToolUse. Raises ServiceError, which names the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refusal("tool_choice: there are no tools to choose from.", "tool_choice")
        return NO_TOOLS
    kinds = _kinds(tools)
    shown = [tool.shown() if isinstance(tool, CustomTool) else tool for tool in tools]
    mode: Literal["none", "auto", "required"] | NamedTool
    allowed_names: frozenset[str] = frozenset()
    match choice:
        case AllowedToolsChoice(allowed_tools=allowed):
            mode = allowed.mode
            allowed_names = frozenset(
                _chosen(named, kinds, f"tool_choice.allowed_tools.tools[{index}]").function.name
                for index, named in enumerate(allowed.tools)
            )
            if mode == "auto":
                # A free answer cannot be held to some of the tools, so the model is not told of the others.
                shown = [tool for tool in shown if tool.function.name in allowed_names]
        case NamedTool() | NamedCustomTool():
            mode = _chosen(choice, kinds, "tool_choice")
        case _:
            mode = choice or "auto"
    if model.tool_calls is None:
        raise refusal(
            "tools: this model's chat template has none, or in a format that is not known here; the setting "
            "model.tool_calls names one.",
            "tools",
            code="unsupported_field",
        )
    return ToolUse(
        shown,
        mode,
        parallel is not False,
        model.tool_calls,
        allowed_names,
        frozenset(name for name, kind in kinds.items() if kind == "custom"),
        strict_where_possible,
    )


def _kinds(tools: Sequence[Tool | CustomTool]) -> dict[str, str]:
    """The type of each tool, by name."""
    kinds: dict[str, str] = {}
    for index, tool in enumerate(tools):
        name = tool.custom.name if isinstance(tool, CustomTool) else tool.function.name
        if name in kinds:
            param = f"tools[{index}].{tool.type}.name"
            raise refusal(f"{param}: there are two tools {name!r}.", param)
        kinds[name] = tool.type
    return kinds


def _chosen(choice: NamedTool | NamedCustomTool, kinds: Mapping[str, str], param: str) -> NamedTool:
    """The choice as a choice of a function: to the model, each tool is a function."""
    chosen = choice.custom if isinstance(choice, NamedCustomTool) else choice.function
    if kinds.get(chosen.name) != choice.type:
        param = f"{param}.{choice.type}.name"
        raise refusal(f"{param}: no {choice.type} tool has the name {chosen.name[:120]!r}.", param)
    return NamedTool(type="function", function=chosen)
