"""Tools as chat completions have them: how clients offer them, and how they send calls back. Other protocols' tools are
turned into these.

A custom tool takes plain text. It is shown to the model as a function whose one argument is that text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import from_json

from serving.front.api.body_limits import BodyLimits, ValueCount
from serving.front.api.fields import JsonSchema, NonEmptyText, refused_kind
from serving.front.api.strict_json import StrictBody, can_travel

MAX_TOOLS = 512
MAX_TOOL_CALLS = 256
ARGUMENTS = BodyLimits(values=100_000)
"""For the arguments of all calls that a body has."""

CUSTOM_ARGUMENT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}

ToolName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]


def _of_an_object(schema: JsonSchema) -> JsonSchema:
    if schema.get("type", "object") != "object":
        raise ValueError("The schema of a function's parameters has the type object.")
    return schema


ObjectSchema = Annotated[JsonSchema, AfterValidator(_of_an_object)]


def _or_refused(served: str) -> BeforeValidator:
    """For the type of a union's member as which unknown types are validated. These are refused by name: the union
    serves others than this member's."""
    return BeforeValidator(
        lambda kind: refused_kind(kind) if isinstance(kind, str) and kind != served else kind
    )


FunctionKind = Annotated[Literal["function"], _or_refused("function")]


class Function(StrictBody):
    """If the model may choose whether to call a tool, the arguments of `strict` functions are held to their schemas. If
    it must call one, the arguments of all functions are."""

    name: ToolName
    description: str | None = None
    parameters: ObjectSchema | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> JsonSchema:
        """The schema of the arguments. OpenAI's rule: a function without parameters takes no arguments."""
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(StrictBody):
    type: FunctionKind = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: the fields that were given, without those that only concern the server."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class Grammar(StrictBody):
    """The model sees the grammar in the tool's description. The text is not held to it."""

    syntax: Literal["lark", "regex"]
    definition: str


class AnyText(StrictBody):
    type: Annotated[Literal["text"], _or_refused("text")]


class TextOfGrammar(StrictBody):
    type: Literal["grammar"]
    grammar: Grammar


def kind_of_format(value: Any) -> str:
    """Any other type is validated as text, and refused as such."""
    return "<grammar>" if isinstance(value, dict) and value.get("type") == "grammar" else "<text>"


TextFormat = Annotated[
    Annotated[AnyText, Tag("<text>")] | Annotated[TextOfGrammar, Tag("<grammar>")],
    Discriminator(kind_of_format),
]


class CustomDefinition(StrictBody):
    name: ToolName
    description: str | None = None
    format: TextFormat | None = None


class CustomTool(StrictBody):
    type: Literal["custom"]
    custom: CustomDefinition

    def shown(self) -> Tool:
        """The tool as the model sees it."""
        held = self.custom.format
        grammar = held.grammar if isinstance(held, TextOfGrammar) else None
        return Tool(
            type="function", function=custom_function(self.custom.name, self.custom.description, grammar)
        )

    def for_template(self) -> dict[str, Any]:
        return self.shown().for_template()


def custom_function(name: str, description: str | None, grammar: Grammar | None) -> Function:
    """A custom tool as the function that the model sees."""
    texts = [description or ""]
    if grammar is not None:
        texts.append(f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}")
    shown = "\n\n".join(filter(None, texts)) or None
    return Function(name=name, description=shown, parameters=CUSTOM_PARAMETERS, strict=False)


class ChosenFunction(StrictBody):
    name: str


class NamedTool(StrictBody):
    type: FunctionKind = "function"
    function: ChosenFunction


class NamedCustomTool(StrictBody):
    type: Literal["custom"]
    custom: ChosenFunction


def _kind_of_tool(value: Any) -> str:
    """Any other type is validated as a function, and refused as such."""
    return "<custom>" if isinstance(value, dict) and value.get("type") == "custom" else "<function>"


AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("<function>")] | Annotated[NamedCustomTool, Tag("<custom>")],
    Discriminator(_kind_of_tool),
]


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(StrictBody):
    """The tools that the model may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict):
        return "<word>"
    kind = value.get("type")
    return f"<{kind}>" if kind in ("allowed_tools", "custom") else "<function>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(_kind_of_tool)
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
    Discriminator(_kind_of_choice),
]


def _may_be_object(arguments: str) -> bool:
    """Whether arguments are parsed: no others are an object. No arguments are an empty one."""
    return arguments.lstrip(" \t\r\n")[:1] in ("", "{")


def check_arguments(of_calls: Iterable[str]) -> None:
    """Raises HTTPException if the arguments of a body's calls have too many values together. They are parsed for the
    template; to the count of the body's values they are strings."""
    count = ValueCount(ARGUMENTS)
    for arguments in filter(_may_be_object, of_calls):
        for _ in count.counted(arguments.encode()):
            pass


def call_for_template(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """A call in an earlier answer, as chat templates expect it: arguments are an object, which templates write as JSON.
    Arguments that are not JSON, as in a call that was cut off, or that have an integer of more than 64 bits, are text.
    """
    if isinstance(arguments, str):
        arguments = _read(arguments)
    elif not can_travel(arguments):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read(arguments: str) -> str | dict[str, Any]:
    """The object in the text; the text if there is none, or if it cannot travel."""
    try:
        read = from_json(arguments or "{}") if _may_be_object(arguments) else None
    except ValueError:
        return arguments
    return read if isinstance(read, dict) and can_travel(read) else arguments


class FunctionCall(StrictBody):
    name: NonEmptyText
    arguments: str
    parsed_arguments: Any = None


class ToolCall(StrictBody):
    """A call in an earlier answer. `index` and `parsed_arguments` come from the client's SDK and have no effect."""

    id: NonEmptyText
    type: FunctionKind
    function: FunctionCall
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.function.name, self.function.arguments)


class CustomText(StrictBody):
    name: NonEmptyText
    input: str


class CustomToolCall(StrictBody):
    """A call of a custom tool in an earlier answer. `index` has no effect."""

    id: NonEmptyText
    type: Literal["custom"]
    custom: CustomText
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """As a call of the function that the model sees."""
        return call_for_template(self.id, self.custom.name, {CUSTOM_ARGUMENT: self.custom.input})


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")],
    Discriminator(_kind_of_tool),
]
ToolCalls = Annotated[list[AnyToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]
"""The calls of one message."""
