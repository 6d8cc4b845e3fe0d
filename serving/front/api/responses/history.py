"""Items of a response, in their canonical form, as messages for a chat template.

A template has one message for all that the model said between two messages of others: thoughts, text and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.front.api.answers.tools_schema import CUSTOM_ARGUMENT, call_for_template
from serving.front.api.responses.items import Json
from serving.front.api.responses.reasoning import thought
from serving.front.api.responses.tools import shown_name

ASSISTANT = "assistant"


def template_messages(instructions: str | None, items: Sequence[Json]) -> tuple[Json, ...]:
    """Everything that was said, as messages of a ChatPrompt. `items` are canonical items of inputs and outputs."""
    history = _History(instructions)
    for item in items:
        history.add(item)
    history.end_answer()
    return tuple(history.messages)


def item_of(index: int, instructions: str | None, items: Sequence[Json]) -> int | None:
    """The index of the item that begins the message of this index; None: the message is the instructions."""
    history = _History(instructions)
    for at, item in enumerate(items):
        if len(history.messages) > index:
            return at - 1 if at else None
        history.add(item)
    return len(items) - 1


class _History:
    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        self._thoughts: list[str] = []
        """Thoughts that wait for the text or the call after them."""
        self._texts: list[str] = []
        """The texts of the last message, if it is an answer that has not ended. They are joined when it ends."""

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
        """Adds a message that is not the model's. Thoughts without text or calls after them are dropped."""
        self.end_answer()
        self._thoughts = []
        self.messages.append({"role": role, "content": text, **more})

    def end_answer(self) -> None:
        """Ends the answer that the conversation ends with, if there is one."""
        if self._texts:
            self.messages[-1]["content"] = "".join(self._texts)
            self._texts = []

    def _answer(self, text: str) -> None:
        """Adds text of the model. Two texts in a row are two answers, unless there are calls between them."""
        last = self._open_answer()
        if last is None or (self._texts and "tool_calls" not in last):
            self._begin()
        if text:
            self._texts.append(text)

    def _call(self, item: Json, arguments: str | Json) -> None:
        last = self._open_answer()
        if last is None:
            last = self._begin()
        name = shown_name(item["name"], item.get("namespace"))
        call = call_for_template(item["call_id"], name, arguments)
        last.setdefault("tool_calls", []).append(call)

    def _open_answer(self) -> Json | None:
        """The answer that the conversation ends with; None if there is none, or if thoughts came after it."""
        last = self.messages[-1] if self.messages else None
        return None if last is None or last["role"] != ASSISTANT or self._thoughts else last

    def _begin(self) -> Json:
        self.end_answer()
        answer: Json = {"role": ASSISTANT, "content": ""}
        if self._thoughts:
            answer["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts = []
        self.messages.append(answer)
        return answer


def _text(parts: Sequence[dict[str, Any]]) -> str:
    """The parts, joined one per line, as in chat."""
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
