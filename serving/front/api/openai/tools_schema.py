"""Tools of /v1/chat/completions: as clients offer them, as they send calls back, and as they are told of calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import from_json

from serving.front.api.fields import JsonSchema, NonEmptyText
from serving.front.api.reply_json import Reply
from serving.front.api.strict_json import StrictBody

MAX_TOOLS = 512
MAX_TOOL_CALLS = 256

ToolName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]


def _of_an_object(schema: JsonSchema) -> JsonSchema:
    if schema.get("type", "object") != "object":
        raise ValueError("The schema of a function's parameters has the type object.")
    return schema


ObjectSchema = Annotated[JsonSchema, AfterValidator(_of_an_object)]


class Function(StrictBody):
    """Where the model chooses whether to call it, the arguments of a `strict` function are held to its schema. Where it
    must call, those of any are."""

    name: ToolName
    description: str | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> JsonSchema:
        """OpenAI's rule: without parameters there are no arguments."""
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(StrictBody):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: what was given, without what concerns the server alone."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class ChosenFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(StrictBody):
    """Some of the tools, among which the model chooses."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict):
        return "<word>"
    return "<allowed>" if value.get("type") == "allowed_tools" else "<function>"


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")],
    Discriminator(_kind_of_choice),
]


class FunctionCall(StrictBody):
    name: NonEmptyText
    arguments: str
    parsed_arguments: Any = None


class ToolCall(StrictBody):
    """A call of an earlier answer. `index` and `parsed_arguments` are what clients made of it; they have no effect."""

    id: NonEmptyText
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves. What is none, as of a call that was cut off, stays text."""
        arguments = self.function.arguments
        try:
            parsed = from_json(arguments or "{}")
        except ValueError:
            parsed = None
        function = {
            "name": self.function.name,
            "arguments": parsed if isinstance(parsed, dict) else arguments,
        }
        return {"id": self.id, "type": self.type, "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]
"""Of one message."""


class CalledFunction(Reply, kw_only=True):
    name: str
    arguments: str


class CalledTool(Reply, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDelta(Reply, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Reply, kw_only=True):
    """The first of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
