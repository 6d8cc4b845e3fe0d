"""Answers as chat messages and deltas. For a call of a custom tool, clients get its text instead of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from serving.front.api.answers.custom_input import CustomInput
from serving.front.api.answers.reader import AnswerPart, AnswerReader, Scope
from serving.front.api.answers.tools import ToolUse
from serving.front.api.openai.chat_schema import (
    AnswerMessage,
    CallDelta,
    CalledCustomText,
    CalledCustomTool,
    CalledFunction,
    CalledTool,
    CustomCallDelta,
    CustomTextDelta,
    Delta,
    FunctionDelta,
)
from serving.front.api.reply_json import or_unset
from serving.text.answer_pieces import CallPiece
from serving.text.reasoning.formats import ReasoningName


class ChatReader(AnswerReader):
    """Reads one choice, and makes what clients get of what it has read."""

    def __init__(self, scope: Scope, tools: ToolUse, reasoning: ReasoningName | None) -> None:
        super().__init__(scope, tools, reasoning)
        self._custom = CustomCalls(tools.custom_names)

    def delta(self, part: AnswerPart, role: Literal["assistant"] | None, *, ended: bool) -> Delta:
        """The chat delta for the choice's next part. `ended`: it is the last part."""
        return Delta(
            role=or_unset(role),
            content=or_unset(part.content),
            reasoning_content=or_unset(part.reasoning),
            tool_calls=or_unset(self._custom.told(part.calls, ended=ended) or None),
        )

    def message(self, part: AnswerPart) -> AnswerMessage:
        """The chat message for a whole choice."""
        called = self._custom.called(part.calls)
        return AnswerMessage(
            content=part.content if called else part.content or "",
            reasoning_content=or_unset(part.reasoning),
            tool_calls=or_unset(called or None),
        )


class CustomCalls:
    """Turns the calls of one choice into what clients get. `names`: the custom tools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._inputs: dict[int, CustomInput] = {}
        """By the index of the call."""

    def told(self, calls: Sequence[CallPiece], *, ended: bool) -> list[CallDelta | CustomCallDelta]:
        """The deltas as clients get them, at most one for each call. `ended`: these are the choice's last, so they have
        the rest of each text."""
        told = [delta for call in calls if (delta := self._delta(call)) is not None]
        if ended:
            self._add_rests(told)
        return told

    def called(self, calls: Sequence[CallPiece]) -> list[CalledTool | CalledCustomTool]:
        """The calls of a whole answer, as clients get them."""
        return [self._whole(call) for call in calls]

    def _delta(self, call: CallPiece) -> CallDelta | CustomCallDelta | None:
        index, name, call_id = call.index, or_unset(call.name), or_unset(call.call_id)
        if call.name in self._names:
            self._inputs[index] = CustomInput()
        reading = self._inputs.get(index)
        if reading is None:
            kind: Literal["function"] | UnsetType = UNSET if call.name is None else "function"
            function = FunctionDelta(name=name, arguments=call.arguments)
            return CallDelta(index=index, id=call_id, type=kind, function=function)
        text = reading.push(call.arguments)
        if call.name is None:
            return CustomCallDelta(index=index, custom=CustomTextDelta(input=text)) if text else None
        begun = CustomTextDelta(name=name, input=text)
        return CustomCallDelta(index=index, id=call_id, type="custom", custom=begun)

    def _add_rests(self, told: list[CallDelta | CustomCallDelta]) -> None:
        by_index = {delta.index: delta for delta in told if isinstance(delta, CustomCallDelta)}
        for index, reading in self._inputs.items():
            if not (text := reading.flush()):
                continue
            if index in by_index:
                by_index[index].custom.input += text
            else:
                told.append(CustomCallDelta(index=index, custom=CustomTextDelta(input=text)))

    def _whole(self, call: CallPiece) -> CalledTool | CalledCustomTool:
        call_id, name = call.call_id or "", call.name or ""
        if name not in self._names:
            return CalledTool(id=call_id, function=CalledFunction(name=name, arguments=call.arguments))
        reading = CustomInput()
        text = reading.push(call.arguments) + reading.flush()
        return CalledCustomTool(id=call_id, custom=CalledCustomText(name=name, input=text))
