"""Items of a response, in their canonical form, as messages for a chat template.

A template has one message for what the model said between two words of others: its thoughts, its text and its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.front.api.openai.tools_schema import CUSTOM_ARGUMENT, FunctionCall, ToolCall
from serving.front.api.responses.items import Json
from serving.front.api.responses.reasoning import thought
from serving.front.api.responses.tools import shown_name

ASSISTANT = "assistant"


def template_messages(instructions: str | None, items: Sequence[Json]) -> tuple[Json, ...]:
    """All that was said, as ChatPrompt takes it. `items` are canonical, of inputs and of outputs alike."""
    history = _History()
    if instructions:
        history.say("system", instructions)
    for item in items:
        history.add(item)
    return tuple(history.messages)


class _History:
    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._thoughts: list[str] = []
        """That wait for what was said after them."""

    def add(self, item: Json) -> None:
        match item["type"]:
            case "reasoning":
                self._thoughts += filter(None, [thought(item)])
            case "message" if item["role"] == ASSISTANT:
                self._answer(_text(item["content"]))
            case "message":
                self.say(item["role"], _text(item["content"]))
            case "function_call":
                self._call(item, item["arguments"])
            case "custom_tool_call":
                self._call(item, {CUSTOM_ARGUMENT: item["input"]})
            case _:
                output = item["output"]
                text = output if isinstance(output, str) else _text(output)
                self.say("tool", text, tool_call_id=item["call_id"])

    def say(self, role: str, text: str, **more: str) -> None:
        """By others than the model. Thoughts that nothing followed are no longer known."""
        self._thoughts = []
        self.messages.append({"role": role, "content": text, **more})

    def _answer(self, text: str) -> None:
        """Two texts in a row are two answers, unless there are calls between them."""
        last = self._open_answer()
        if last is not None and (not last["content"] or "tool_calls" in last):
            last["content"] += text
        else:
            self._begin(text)

    def _call(self, item: Json, arguments: str | Json) -> None:
        last = self._open_answer()
        if last is None:
            last = self._begin("")
        name = shown_name(item["name"], item.get("namespace"))
        if isinstance(arguments, str):
            function = FunctionCall.model_construct(name=name, arguments=arguments)
            call = ToolCall.model_construct(id=item["call_id"], type="function", function=function)
            shown = call.for_template()
        else:
            told = {"name": name, "arguments": arguments}
            shown = {"id": item["call_id"], "type": "function", "function": told}
        last.setdefault("tool_calls", []).append(shown)

    def _open_answer(self) -> Json | None:
        """The answer that the conversation ends with, if nothing was thought since."""
        last = self.messages[-1] if self.messages else None
        return None if last is None or last["role"] != ASSISTANT or self._thoughts else last

    def _begin(self, text: str) -> Json:
        answer: Json = {"role": ASSISTANT, "content": text}
        if self._thoughts:
            answer["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts = []
        self.messages.append(answer)
        return answer


def _text(parts: Sequence[dict[str, Any]]) -> str:
    """Parts are joined one per line, as chat's are."""
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
