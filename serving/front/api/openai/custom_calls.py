"""Calls of custom tools among those of one choice: clients get their text in place of arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from serving.front.api.openai.custom_input import CustomInput
from serving.front.api.openai.tools_schema import (
    CallDelta,
    CalledCustomText,
    CalledCustomTool,
    CalledFunction,
    CalledTool,
    CustomCallDelta,
    CustomTextDelta,
)


class CustomCalls:
    """Follows one choice. `names` are those of the custom tools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._inputs: dict[int, CustomInput] = {}
        """By the places of the calls."""

    def told(self, calls: Sequence[CallDelta], *, ended: bool) -> list[CallDelta | CustomCallDelta]:
        """What clients are told of these; `ended` with the last of the choice, when all that is left of a text is."""
        told = [delta for call in calls if (delta := self._delta(call)) is not None]
        return [*told, *self._rest()] if ended else told

    def called(self, calls: Sequence[CallDelta]) -> list[CalledTool | CalledCustomTool]:
        """Those of a whole answer."""
        return [self._whole(call) for call in calls]

    def _delta(self, call: CallDelta) -> CallDelta | CustomCallDelta | None:
        name = call.function.name
        if name is not UNSET and name in self._names:
            self._inputs[call.index] = CustomInput()
        reading = self._inputs.get(call.index)
        if reading is None:
            return call
        text = reading.push(call.function.arguments)
        if name is UNSET:
            return CustomCallDelta(index=call.index, custom=CustomTextDelta(input=text)) if text else None
        begun = CustomTextDelta(name=name, input=text)
        return CustomCallDelta(index=call.index, id=call.id, type="custom", custom=begun)

    def _rest(self) -> Iterator[CustomCallDelta]:
        for index, reading in self._inputs.items():
            if text := reading.flush():
                yield CustomCallDelta(index=index, custom=CustomTextDelta(input=text))

    def _whole(self, call: CallDelta) -> CalledTool | CalledCustomTool:
        call_id, name = call.id or "", call.function.name or ""
        if name not in self._names:
            return CalledTool(
                id=call_id, function=CalledFunction(name=name, arguments=call.function.arguments)
            )
        reading = CustomInput()
        text = reading.push(call.function.arguments) + reading.flush()
        return CalledCustomTool(id=call_id, custom=CalledCustomText(name=name, input=text))
