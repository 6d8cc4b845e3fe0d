"""Runs the turns of responses, in the sessions that they begin or go on in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from serving.front.api.first_turns import close_unused, run_first_turn
from serving.front.api.recorded_turns import RecordedTurn
from serving.front.api.responses.background import BackgroundResponses
from serving.front.api.responses.store import Continued
from serving.front.api.turn_streams import TurnPlan
from serving.wire.turns import TurnCall, TurnEvent, TurnService


@dataclass(frozen=True, slots=True)
class ResponseTurns:
    """The turn of a response that goes on from `before` (RunsTurns). A session that is made for it is closed unless the
    response is in it: nobody asks again under its id."""

    service: TurnService
    before: Continued

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        await self.before.make_fork(self.service, call.tenant)
        turn = run_first_turn(self.service, call) if self.before.begins_session else self.service.run(call)
        async with turn as events:
            yield events

    async def start(self, background: BackgroundResponses, plan: TurnPlan) -> RecordedTurn:
        """Behind the request: from then on the session says how the response ended, whatever comes of its turn. Raises
        ServiceError."""
        (call,) = plan.calls
        await self.before.make_fork(self.service, call.tenant)
        try:
            return await background.start(self.service, plan)
        except BaseException:
            if self.before.begins_session:
                await close_unused(self.service, call)
            raise
