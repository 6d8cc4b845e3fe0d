"""Runs the turns of responses, in sessions that they begin or continue."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from serving.front.api.responses.background import BackgroundResponses
from serving.front.api.responses.continuations import Continued
from serving.front.api.responses.replayable_turn import ReplayableTurn
from serving.front.api.service import TurnService
from serving.front.api.turn_streams import TurnPlan
from serving.front.api.unused_sessions import close_unused, run_first_turn
from serving.wire.errors import ANOTHERS_TURN
from serving.wire.turns import ServiceError, SessionTurn, TurnCall, TurnEvent


@dataclass(frozen=True, slots=True)
class ResponseTurns:
    """Runs the turn of a response that goes on from `before` (RunsTurns). `session_turn` makes its SessionTurn. If
    another turn has taken its place, the response gets a session of its own (Continued.apart). A session that is made
    for the response is closed if the turn comes to nothing: nobody will ask for it under that id again."""

    service: TurnService
    before: Continued
    session_turn: Callable[[Continued], SessionTurn | None]

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        async with AsyncExitStack() as stack:
            try:
                events = await stack.enter_async_context(self._run(self.before, call))
            except ServiceError as error:
                if not self._is_taken(error):
                    raise
                events = await stack.enter_async_context(self._run(*self._apart(call)))
            yield events

    async def start(self, background: BackgroundResponses, plan: TurnPlan) -> ReplayableTurn:
        """Starts the turn in the background. From then on the session records how the response ended, even if its turn
        comes to nothing. Raises ServiceError."""
        (call,) = plan.calls
        try:
            return await self._start(self.before, call, background, plan)
        except ServiceError as error:
            if not self._is_taken(error):
                raise
        return await self._start(*self._apart(call), background, plan)

    @asynccontextmanager
    async def _run(self, before: Continued, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        await before.make_fork(self.service, call.tenant)
        turn = run_first_turn(self.service, call) if before.begins_session else self.service.run(call)
        async with turn as events:
            yield events

    async def _start(
        self, before: Continued, call: TurnCall, background: BackgroundResponses, plan: TurnPlan
    ) -> ReplayableTurn:
        await before.make_fork(self.service, call.tenant)
        try:
            return await background.start(self.service, dataclasses.replace(plan, calls=[call]))
        except BaseException:
            if before.begins_session:
                await close_unused(self.service, call)
            raise

    def _is_taken(self, error: ServiceError) -> bool:
        return self.before.needs_its_place and error.info.code in ANOTHERS_TURN

    def _apart(self, call: TurnCall) -> tuple[Continued, TurnCall]:
        before = self.before.apart(call.request_id)
        return before, replace(call, session=self.session_turn(before))
