"""The input of /v1/responses: items that clients send, and items of earlier answers that they send back.

`canonical` gives an item as OpenAI lists it: plain JSON in which short forms are spelled out. Items of answers have
that form from the start, so inputs and outputs can be stored, and shown to a model, alike.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)

from serving.front.api.answers.tools_schema import check_arguments
from serving.front.api.fields import (
    MAX_PARTS,
    DirectCaller,
    NonEmptyText,
    OtherKind,
    refused_kind,
    stays_in_a_path,
)
from serving.front.api.strict_json import NotSupported, StrictBody

MAX_ITEMS = 16_384
MAX_ID_CHARS = 512

Json = dict[str, Any]
ItemId = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_ID_CHARS), AfterValidator(stays_in_a_path)
]
"""The id of an item: calls name it in their paths and queries."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TextOfItem(StrictBody):
    """Text of the client, or of an earlier answer. Only `text` has an effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = Field(None, description="This field has no effect.")


class RefusalOfItem(StrictBody):
    type: Literal["refusal"]
    refusal: str


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return "<text>"
    return "<refusal>" if kind == "refusal" else "<other>"


Part = Annotated[
    Annotated[TextOfItem, Tag("<text>")]
    | Annotated[RefusalOfItem, Tag("<refusal>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_part_kind),
]


def _text_or_parts(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(_text_or_parts),
]
Output = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(_text_or_parts),
]


def _parts(content: str | list[Any], kind: str) -> list[Json]:
    """The parts of a message. Texts become parts of this `kind`, whichever kind the client gave them."""
    texts = [content] if isinstance(content, str) else content
    return [_part(text, kind) for text in texts]


def _part(part: Any, kind: str) -> Json:
    if isinstance(part, RefusalOfItem):
        return {"type": "refusal", "refusal": part.refusal}
    text = part if isinstance(part, str) else part.text
    shown: Json = {"type": kind, "text": text}
    return shown | ({"annotations": [], "logprobs": []} if kind == "output_text" else {})


class MessageItem(StrictBody):
    """A message. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Annotated[
        Literal["commentary", "final_answer"] | None, Field(description="This field has no effect.")
    ] = None

    def canonical(self, new_id: str) -> Json:
        return {
            "id": self.id or f"msg_{new_id}",
            "type": "message",
            "status": self.status or "completed",
            "role": str(self.role),
            "content": _parts(self.content, "output_text" if self.role == "assistant" else "input_text"),
        }


class CallItem(StrictBody):
    """Fields of both kinds of calls. `async` says which side runs a call; here it is always the client."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    id: ItemId | None = None
    call_id: NonEmptyText
    name: NonEmptyText
    namespace: NonEmptyText | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None
    async_: NotSupported = Field(None, alias="async")

    def _shown(self, kind: str, prefix: str, new_id: str, **said: str) -> Json:
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {
            "id": self.id or f"{prefix}_{new_id}",
            "type": str(kind),
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            **namespace,
            **said,
        }


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: str
    parsed_arguments: Any = Field(
        None, description="The arguments as the client's SDK parsed them. It has no effect."
    )

    def canonical(self, new_id: str) -> Json:
        return self._shown(self.type, "fc", new_id, arguments=self.arguments)


class CustomCall(CallItem):
    type: Literal["custom_tool_call"]
    input: str

    def canonical(self, new_id: str) -> Json:
        return self._shown(self.type, "ctc", new_id, input=self.input)


class CallOutput(StrictBody):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NonEmptyText
    output: Output
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = Field(None, description="The tool's name. It has no effect: the call has it, too.")
    namespace: str | None = None
    caller: DirectCaller | None = None

    def canonical(self, new_id: str) -> Json:
        output = self.output if isinstance(self.output, str) else _parts(self.output, "input_text")
        prefix = "fco" if self.type == "function_call_output" else "ctco"
        return {
            "id": self.id or f"{prefix}_{new_id}",
            "type": str(self.type),
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": output,
        }


class ReasoningText(StrictBody):
    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(StrictBody):
    type: Literal["summary_text"]
    text: str


class Reasoning(StrictBody):
    """The model's thoughts. Without `content` they are taken from `encrypted_content`, if Kedge wrote it; otherwise the
    item has no effect."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None

    def canonical(self, new_id: str) -> Json:
        return {
            "id": self.id or f"rs_{new_id}",
            "type": "reasoning",
            "status": self.status or "completed",
            "summary": [{"type": "summary_text", "text": each.text} for each in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": each.text} for each in self.content or ()],
            "encrypted_content": self.encrypted_content,
        }


_TAGS = {
    "message": "<message>",
    "function_call": "<call>",
    "custom_tool_call": "<custom call>",
    "function_call_output": "<output>",
    "custom_tool_call_output": "<output>",
    "reasoning": "<reasoning>",
}


def _item_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "<message>"
    kind = value.get("type")
    if kind is None:
        return "<message>" if "role" in value or "id" not in value else "<reference>"
    return _TAGS.get(kind, "<other>") if isinstance(kind, str) else "<other>"


class Reference(StrictBody):
    """A reference to an item. It is refused."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str | None, Field(validate_default=True)] = None

    @field_validator("type")
    @classmethod
    def _refused(cls, _kind: str | None, _info: ValidationInfo) -> str:
        return refused_kind("item_reference")


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<call>")]
    | Annotated[CustomCall, Tag("<custom call>")]
    | Annotated[CallOutput, Tag("<output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[Reference, Tag("<reference>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_item_kind),
]


def _few_values_in_calls(items: list[Any]) -> list[Any]:
    check_arguments(item.arguments for item in items if isinstance(item, FunctionCallItem))
    return items


AnyItems = Annotated[
    list[Item], Field(max_length=MAX_ITEMS, fail_fast=True), AfterValidator(_few_values_in_calls)
]
Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    AfterValidator(_few_values_in_calls),
]
Input = Annotated[
    Annotated[NonEmptyText, Tag("<text>")] | Annotated[AnyItems, Tag("<parts>")],
    Discriminator(_text_or_parts),
]


def canonical_items(given: str | list[Any], response_id: str) -> list[Json]:
    """The request's items as JSON. Items without an id get one that is derived from the response's id."""
    scope = response_scope(response_id)
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    return [item.canonical(f"{scope}i{index}") for index, item in enumerate(items)]


def response_scope(response_id: str) -> str:
    """The part of a response's id that the ids of all its items contain."""
    return response_id.partition("_")[2]
