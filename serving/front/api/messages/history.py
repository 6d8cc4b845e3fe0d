"""Messages of /v1/messages as chat templates expect them.

There each tool result is a separate message, and successive messages of one role are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from serving.front.api.answers.tools_schema import call_for_template
from serving.front.api.messages.blocks import (
    Message,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    text_of,
)

TemplateMessage = dict[str, Any]
_JOINED = ("reasoning_content", "content")
"""Texts that joined messages have of all of them."""


def for_template(
    system: str | list[TextBlock] | None, messages: Sequence[Message]
) -> tuple[TemplateMessage, ...]:
    """The whole conversation. An empty system prompt is left out."""
    return tuple(message for _, message in _placed(system, messages))


def message_of(index: int, system: str | list[TextBlock] | None, messages: Sequence[Message]) -> int | None:
    """The index of the request's message that begins the prompt's message of this index; None: that is the system
    prompt."""
    return _placed(system, messages)[index][0]


def _placed(
    system: str | list[TextBlock] | None, messages: Sequence[Message]
) -> list[tuple[int | None, TemplateMessage]]:
    """The prompt's messages. Each comes with the index of the request's message that begins it."""
    groups: list[tuple[int | None, list[TemplateMessage]]] = []
    instruction = "" if system is None else text_of(system)
    if instruction:
        groups.append((None, [{"role": "system", "content": instruction}]))
    last_user = max((i for i, each in enumerate(messages) if isinstance(each, UserMessage)), default=-1)
    for index, message in enumerate(messages):
        cleared = isinstance(message, SystemMessage) and message.clear_at == "next_user_message"
        if not (cleared and index < last_user):
            for each in _messages_of(message):
                if groups and _are_joined(groups[-1][1][-1], each):
                    groups[-1][1].append(each)
                else:
                    groups.append((index, [each]))
    return [(index, _joined(group)) for index, group in groups]


def _messages_of(message: Message) -> Iterable[TemplateMessage]:
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
    elif isinstance(message, SystemMessage):
        yield {"role": "system", "content": text_of(message.content)}
    elif isinstance(message, UserMessage):
        for block in message.content:
            assert not isinstance(block, str)
            yield _told(block) if isinstance(block, ToolResultBlock) else _said(block)
    else:
        assert not isinstance(message.content, str)
        yield _answered(message.content)


def _said(block: TextBlock) -> TemplateMessage:
    return {"role": "user", "content": block.text}


def _told(block: ToolResultBlock) -> TemplateMessage:
    """A tool result. Templates have no field for errors of tools, so the text says that it is one."""
    text = "" if block.content is None else text_of(block.content)
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _answered(
    blocks: Sequence[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock],
) -> TemplateMessage:
    message: TemplateMessage = {
        "role": "assistant",
        "content": "\n".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    called = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if called:
        message["tool_calls"] = [call_for_template(block.id, block.name, block.input) for block in called]
    return message


def _are_joined(last: TemplateMessage, new: TemplateMessage) -> bool:
    """Whether two successive messages are joined: those of one role are, but tool results and instructions are not."""
    return last["role"] == new["role"] and new["role"] in ("user", "assistant")


def _joined(messages: Sequence[TemplateMessage]) -> TemplateMessage:
    """Messages of one role as one. Each text is copied once, however many there are."""
    first, *others = messages
    if not others:
        return first
    joined = dict(first)
    for name in _JOINED:
        texts = [text for each in messages if (text := each.get(name))]
        if texts:
            joined[name] = "\n".join(texts)
    if calls := [call for each in messages for call in each.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
