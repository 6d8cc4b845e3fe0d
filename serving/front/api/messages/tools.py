"""Tools of /v1/messages, as functions for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from serving.front.api.answers.tools import ToolUse, tool_use
from serving.front.api.answers.tools_schema import (
    MAX_TOOLS,
    ChosenFunction,
    Function,
    NamedTool,
    ObjectSchema,
    Tool,
    ToolChoice,
    ToolName,
)
from serving.front.api.errors import refusal
from serving.front.api.messages.blocks import CacheControl, one_of
from serving.front.api.strict_json import StrictBody
from serving.wire.turns import ModelInfo

MAX_EXAMPLES = 64


class AnthropicTool(StrictBody):
    """A tool that the client runs. The model sees it from the beginning, whatever `defer_loading` says.
    `input_examples`, `allowed_callers` and `eager_input_streaming` have no effect."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: ObjectSchema
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[str], Field(max_length=8)] | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=MAX_EXAMPLES)] | None = None

    def as_function(self) -> Tool:
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


def _custom(tool: Any) -> Any:
    """Refuses tools of other types: Anthropic's servers run them, or only its models know their schema."""
    if isinstance(tool, dict) and tool.get("type") is not None:
        return one_of("type", "custom")(tool)
    return tool


class AnthropicToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(
        None,
        description="Read where a call is required (`any`, `tool`): the answer then has one. With `auto` it has no "
        "effect.",
    )

    @model_validator(mode="after")
    def _name_of_the_tool(self) -> AnthropicToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("A name goes with the type tool, and only with it.")
        return self

    def as_function_choice(self) -> ToolChoice:
        match self.type:
            case "any":
                return "required"
            case "tool":
                return NamedTool(type="function", function=ChosenFunction(name=self.name or ""))
            case word:
                return word


AnthropicTools = Annotated[
    list[Annotated[AnthropicTool, BeforeValidator(_custom)]], Field(max_length=MAX_TOOLS, fail_fast=True)
]


def tools_in_use(
    tools: Sequence[AnthropicTool] | None, choice: AnthropicToolChoice | None, model: ModelInfo
) -> ToolUse:
    """How the request uses tools. Raises ServiceError, which names the field as this protocol calls
    it."""
    _check_names(tools or (), choice)
    return tool_use(
        [tool.as_function() for tool in tools or ()],
        None if choice is None else choice.as_function_choice(),
        None if choice is None else not choice.disable_parallel_tool_use,
        model,
    )


def _check_names(tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            param = f"tools[{index}].name"
            raise refusal(f"{param}: there are two tools {tool.name!r}.", param)
        names.add(tool.name)
    if tools and choice is not None and choice.type == "tool" and choice.name not in names:
        param = "tool_choice.name"
        raise refusal(f"{param}: no tool has the name {str(choice.name)[:120]!r}.", param)
