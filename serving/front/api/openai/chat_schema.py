"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from serving.front.api.answers.tools_schema import (
    ToolCall,
    ToolCalls,
    ToolChoice,
    Tools,
    check_arguments,
)
from serving.front.api.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    RAW_LOGPROBS,
    Count,
    NonEmptyText,
    OtherKind,
    TopLogprobs,
)
from serving.front.api.openai.replies import StopDetails, Usage
from serving.front.api.openai.requests import OpenAiBody
from serving.front.api.reply_json import Reply
from serving.front.api.shared_fields import TemplateKwargs
from serving.front.api.strict_json import NotSupported, StrictBody

MAX_TEMPLATE_CHARS = 65_536


class TextPart(StrictBody):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = Field(None, description="This field has no effect.")


class RefusalPart(StrictBody):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "refusal") else "<other>"


def _kind_of_content(value: Any) -> str:
    if value is None:
        return "<none>"
    return "<parts>" if isinstance(value, list) else "<text>"


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[OtherKind, Tag("<other>")],
    Discriminator(_kind_of_part),
]
Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")]
    | Annotated[None, Tag("<none>")],
    Discriminator(_kind_of_content),
]


class Message(StrictBody):
    """A message of the client, or an earlier answer that the client sends back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[NonEmptyText | None, Field(validate_default=True)] = None
    content: Content = None
    name: str | None = None
    parsed: Any = Field(None, description="The content as the client's SDK parsed it. It has no effect.")

    annotations: NotSupported = None
    audio: NotSupported = None
    function_call: NotSupported = None
    reasoning_content: str | None = Field(
        None, description="The assistant's thoughts, as an earlier answer had them."
    )
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    refusal: str | None = Field(None, description="The assistant's refusal, in place of a content.")

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _by_the_assistant(cls, calls: Any, info: ValidationInfo) -> Any:
        if calls and info.data.get("role", "assistant") != "assistant":
            raise ValueError("Only the assistant's messages have tool calls.")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_result(cls, call_id: str | None, info: ValidationInfo) -> str | None:
        role = info.data.get("role")
        if role == "tool" and call_id is None:
            raise ValueError("A message of role tool needs the id of the call that it answers.")
        if role != "tool" and call_id is not None and role is not None:
            raise ValueError("Only messages of role tool answer a call.")
        return call_id

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("Give a content, a text or null; only an assistant's message does without.")
        parts = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in parts):
            raise ValueError("Only the assistant's messages have refusals.")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text parts are joined, one per line. A null content becomes an empty text, or
        the assistant's refusal."""
        in_its_place = self.refusal if self.role == "assistant" else None
        parts: str | list[Any] = in_its_place or [] if self.content is None else self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message: dict[str, Any] = {"role": str(self.role), "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _few_values_in_calls(messages: list[Message]) -> list[Message]:
    calls = (call for message in messages for call in message.tool_calls or ())
    check_arguments(call.function.arguments for call in calls if isinstance(call, ToolCall))
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    AfterValidator(_few_values_in_calls),
]
ChatTemplateText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(OpenAiBody):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = Field(None, description=RAW_LOGPROBS)
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None,
        description="Read where a call is required: the answer then has one. With `auto` it has no effect.",
    )
    modalities: Annotated[list[Literal["text"]], Field(max_length=8)] | None = None
    add_generation_prompt: bool | None = Field(None, description="If false, no answer is opened.")
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")
    add_special_tokens: bool | None = Field(
        None, description="If true, the tokenizer adds special tokens to those that the chat template writes."
    )
    chat_template: ChatTemplateText | None = Field(
        None,
        description="Replaces the model's own template, if the setting api.request_chat_template allows it.",
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="The chat template gets it. Some templates ignore it."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="This field has no effect.")

    audio: NotSupported = None
    documents: NotSupported = None
    echo: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    mm_processor_kwargs: NotSupported = None
    prediction: NotSupported = None
    web_search_options: NotSupported = None

    def asked_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets beside the messages. `chat_template_kwargs` takes precedence."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class ChatLogprobs(Reply, kw_only=True):
    """The entries are written separately (reply_json.py)."""

    content: list[dict[str, Any]]


class CalledFunction(Reply, kw_only=True):
    name: str
    arguments: str


class CalledTool(Reply, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustomText(Reply, kw_only=True):
    name: str
    input: str


class CalledCustomTool(Reply, kw_only=True):
    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustomText


class FunctionDelta(Reply, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Reply, kw_only=True):
    """A part of a call. The first part has the call's id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class CustomTextDelta(Reply, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class CustomCallDelta(Reply, kw_only=True):
    """The same of a call of a custom tool."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["custom"] | UnsetType = UNSET
    custom: CustomTextDelta


class AnswerMessage(Reply, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool | CalledCustomTool] | UnsetType = UNSET


class ChatChoice(StopDetails, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None


class ChatReply(Reply, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Delta(Reply, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta | CustomCallDelta] | UnsetType = UNSET


class ChunkChoice(StopDetails, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Reply, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
