"""The form in which a chat template reads an assistant's calls.

Messages have the form that transformers documents: arguments are an object, and thoughts and content are fields of
their own (transformers gives thoughts the other names that templates read). Some templates refuse that. What a template
takes is found by trying it, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import InvalidRequest

Message = Mapping[str, Any]

_CALL_NAME = "kedge_stand_in_call"
_CALL = {"id": "KedgeCall", "type": "function", "function": {"name": _CALL_NAME, "arguments": {"a": 1}}}
_QUESTION: Message = {"role": "user", "content": "Question"}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SAID_BEFORE: Message = {**_CALLED, "content": "I will look.", "reasoning_content": "Hm."}
_RESULT: Message = {"role": "tool", "content": "Result", "tool_call_id": "KedgeCall"}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """`text_arguments`: arguments are JSON text, as for DeepSeek-V3.1. `joined`: what is said before calls is part of
    the thoughts before them, since the template refuses both, as GPT-OSS's does."""

    text_arguments: bool = False
    joined: bool = False

    @classmethod
    def of(cls, render: Callable[[Sequence[Message]], str]) -> MessageForm:
        """The form that a template takes. `render` renders messages with it, and may raise InvalidRequest."""

        def takes(form: MessageForm, called: Message) -> bool:
            try:
                return _CALL_NAME in render(form.shaped((_QUESTION, called, _RESULT)))
            except InvalidRequest:
                return False

        called = next((form for form in (cls(), cls(text_arguments=True)) if takes(form, _CALLED)), None)
        if called is None:
            return cls()
        both = (called, cls(called.text_arguments, joined=True))
        return next((form for form in both if takes(form, _SAID_BEFORE)), called)

    def shaped(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in this form."""
        if self == MessageForm():
            return messages
        return [self._shaped(message) if message.get("tool_calls") else message for message in messages]

    def _shaped(self, message: Message) -> Message:
        changed: dict[str, Any] = {}
        if self.text_arguments:
            changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        thought, said = message.get("reasoning_content"), message["content"]
        if self.joined and thought and said:
            changed |= {"reasoning_content": f"{thought}\n\n{said}", "content": ""}
        return {**message, **changed}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
