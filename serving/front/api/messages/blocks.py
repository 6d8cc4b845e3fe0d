"""Messages of /v1/messages as clients send them: blocks of text, tool calls, their results, and thinking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from serving.front.api.fields import MAX_MESSAGES, DirectCaller, NonEmptyText, one_or_many
from serving.front.api.strict_json import NotSupported, StrictBody

MAX_BLOCKS = 1024
"""Most blocks of one message."""


class CacheControl(StrictBody):
    """Marks a prefix to be cached. It has no effect, because every prefix is cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(StrictBody):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: NotSupported = None


class ThinkingBlock(StrictBody):
    """The model's thoughts in an earlier answer. The signature has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictBody):
    """Thoughts of another server's model. Only that server can read them, so they are left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictBody):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: NonEmptyText
    name: NonEmptyText
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: NotSupported = None


def tag_of(field: str) -> Callable[[Any], str]:
    """A function that gives a union member's tag: its `field`, in angle brackets, so that no error names the tag."""

    def tag(value: dict[str, Any]) -> str:
        return f"<{value[field]}>"

    return tag


def one_of(field: str, *known: str) -> Callable[[Any], Any]:
    """A validator that accepts only objects whose `field` is one of `known`. The error names the value it refuses."""
    wanted = ", ".join(known)

    def check(value: Any) -> Any:
        if not isinstance(value, dict) or field not in value:
            raise ValueError(f"Send an object with a {field}, one of: {wanted}.")
        if value[field] not in known:
            raise ValueError(f"{field} {str(value[field])[:80]!r} is not taken here, only: {wanted}.")
        return value

    return check


TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(one_of("type", "text"))]],
    Field(max_length=MAX_BLOCKS, fail_fast=True),
]
Text = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[TextBlocks, Tag("<many>")], Discriminator(one_or_many)
]


class ToolResultBlock(StrictBody):
    type: Literal["tool_result"]
    tool_use_id: NonEmptyText
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: NotSupported = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(tag_of("type")),
    BeforeValidator(one_of("type", "text", "tool_result")),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(tag_of("type")),
    BeforeValidator(one_of("type", "text", "thinking", "redacted_thinking", "tool_use")),
]


class UserMessage(StrictBody):
    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[
            list[UserBlock], Field(min_length=1, max_length=MAX_BLOCKS, fail_fast=True), Tag("<many>")
        ],
        Discriminator(one_or_many),
    ]


class AssistantMessage(StrictBody):
    """An answer without content has an empty list of blocks."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<one>")]
        | Annotated[list[AssistantBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("<many>")],
        Discriminator(one_or_many),
    ]


class SystemMessage(StrictBody):
    """Instructions within a conversation. With `clear_at: next_user_message` they end at the next user's message."""

    role: Literal["system"]
    content: Text
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: NotSupported = None


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(tag_of("role")),
    BeforeValidator(one_of("role", "user", "assistant", "system")),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def text_of(content: str | list[TextBlock]) -> str:
    """The blocks of a text, one per line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
