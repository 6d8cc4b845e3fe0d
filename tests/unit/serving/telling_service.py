"""A service whose answers the test gives, and a call of a function for it to say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.wire.turns import TurnCall, TurnEvent, TurnFinish
from tests.unit.serving.replica_rig import MODEL

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "get_weather"}}
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
STOP = TurnFinish("stop")


class TellingService:
    """A TurnService whose answers the test gives, one event for each piece."""

    model = MODEL

    def __init__(self, *pieces: str, finish: TurnFinish = STOP) -> None:
        self._pieces = pieces
        self._finish = finish
        self.calls: list[TurnCall] = []

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        self.calls.append(call)
        yield self._events(call)

    async def _events(self, call: TurnCall) -> AsyncIterator[TurnEvent]:
        turn_index = None if call.session is None else 3
        for number, piece in enumerate(self._pieces):
            yield TurnEvent(piece, (number,), 5, 0, number + 1, turn_index=turn_index)
        yield TurnEvent("", (), 5, 0, len(self._pieces), finish=self._finish, turn_index=turn_index)
