"""Tools of /v1/responses: as functions for chat templates, and as the client's tools that a call belongs to.

A function in a namespace is shown to the model under both names, joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from serving.front.api.answers.tools import ToolUse, tool_use
from serving.front.api.answers.tools_schema import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    AnyText,
    ChosenFunction,
    Function,
    Grammar,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
    custom_function,
    kind_of_format,
)
from serving.front.api.errors import refusal
from serving.front.api.fields import OtherKind
from serving.front.api.strict_json import NotSupported, StrictBody
from serving.wire.turns import ModelInfo

BETWEEN_NAMES = "__"
"""Joins a namespace and a name in what the model sees."""
MAX_NAME_CHARS = 128


class _Offered(StrictBody):
    """The fields that say who may call a tool, and when its client runs it. Whatever the server would have to do is
    refused."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    defer_loading: NotSupported = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=8)] | None = None
    async_: NotSupported = Field(None, alias="async")


class FunctionTool(Function, _Offered):
    type: Literal["function"]
    output_schema: Any = Field(None, description="This field has no effect.")

    def shown(self, name: str) -> Function:
        return Function(
            name=name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class GrammarFormat(Grammar):
    type: Literal["grammar"]


CustomFormat = Annotated[
    Annotated[AnyText, Tag("<text>")] | Annotated[GrammarFormat, Tag("<grammar>")],
    Discriminator(kind_of_format),
]


class CustomTextTool(_Offered):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None

    def shown(self, name: str) -> Function:
        grammar = self.format if isinstance(self.format, GrammarFormat) else None
        return custom_function(name, self.description, grammar)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else "<other>"


def _own_kind(value: Any) -> str:
    kind = _kind(value)
    return kind if kind in ("<function>", "<custom>") else "<other>"


def _tool_kind(value: Any) -> str:
    return "<namespace>" if _kind(value) == "<namespace>" else _own_kind(value)


OwnTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTextTool, Tag("<custom>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_own_kind),
]


class Namespace(StrictBody):
    """Tools in a common namespace."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTextTool, Tag("<custom>")]
    | Annotated[Namespace, Tag("<namespace>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_tool_kind),
]
ResponsesTools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTool(StrictBody):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def _kind_of_allowed(value: Any) -> str:
    return "<other>" if _own_kind(value) == "<other>" else "<tool>"


AllowedTool = Annotated[
    Annotated[ChosenTool, Tag("<tool>")] | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_kind_of_allowed),
]


class AllowedNames(StrictBody):
    """The tools that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict):
        return "<word>"
    return "<allowed>" if _kind(value) == "<allowed_tools>" else _kind_of_allowed(value)


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ChosenTool, Tag("<tool>")]
    | Annotated[AllowedNames, Tag("<allowed>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_kind_of_choice),
]


def shown_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{BETWEEN_NAMES}{name}"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the client runs. `field` is its place in the request."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    function: Function
    field: str


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """All tools of one request, by the names that the model sees, and how they are used."""

    by_shown_name: Mapping[str, OfferedTool]
    use: ToolUse

    def called(self, shown: str) -> OfferedTool | None:
        """The tool that the model sees under this name; None if the model made the name up."""
        return self.by_shown_name.get(shown)


def offered_tools(
    tools: Sequence[Any] | None, choice: Any, parallel: bool | None, model: ModelInfo
) -> OfferedTools:
    """The tools of a request. Raises ServiceError, which names the field."""
    offered: dict[str, OfferedTool] = {}
    for tool in _each(tools or ()):
        shown = tool.function.name
        if shown in offered:
            param = f"{tool.field}.name"
            raise refusal(f"{param}: there are two tools {shown!r}.", param)
        offered[shown] = tool
    told = [Tool(type="function", function=tool.function) for tool in offered.values()]
    use = tool_use(told, _chosen(choice, offered), parallel, model, strict_where_possible=True)
    return OfferedTools(offered, use)


def _each(tools: Sequence[Any]) -> Iterable[OfferedTool]:
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if isinstance(tool, Namespace):
            for inner, own in enumerate(tool.tools):
                yield _offered(_served(own), tool.name, f"{place}.tools[{inner}]")
        else:
            yield _offered(_served(tool), None, place)


def _served(tool: FunctionTool | CustomTextTool | OtherKind) -> FunctionTool | CustomTextTool:
    assert not isinstance(tool, OtherKind), "its type is refused when it is read"
    return tool


def _offered(tool: FunctionTool | CustomTextTool, namespace: str | None, place: str) -> OfferedTool:
    shown = shown_name(tool.name, namespace)
    if len(shown) > MAX_NAME_CHARS:
        param = f"{place}.name"
        raise refusal(f"{param}: longer than {MAX_NAME_CHARS} characters with its namespace.", param)
    return OfferedTool(tool.type, tool.name, namespace, tool.shown(shown), place)


def _chosen(choice: Any, offered: Mapping[str, OfferedTool]) -> ToolChoice | None:
    """The choice as a tool choice of chat completions, which knows tools by the names that the model sees."""
    if isinstance(choice, ChosenTool):
        return _named(_known(choice, offered, "tool_choice"))
    if isinstance(choice, AllowedNames):
        named: list[NamedTool | NamedCustomTool] = [
            _named(_known(each, offered, f"tool_choice.tools[{index}]"))
            for index, each in enumerate(choice.tools)
            if isinstance(each, ChosenTool)
        ]
        allowed = AllowedTools(mode=choice.mode, tools=named)
        return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
    word: ToolChoice | None = choice
    return word


def _named(shown: str) -> NamedTool:
    return NamedTool(type="function", function=ChosenFunction(name=shown))


def _known(choice: ChosenTool, offered: Mapping[str, OfferedTool], place: str) -> str:
    shown = shown_name(choice.name, choice.namespace)
    tool = offered.get(shown)
    if tool is None or tool.kind != choice.type:
        param = f"{place}.name"
        raise refusal(f"{param}: no {choice.type} tool has the name {choice.name[:120]!r}.", param)
    return shown
