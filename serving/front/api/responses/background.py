"""Background responses, made after their requests are answered: those that run in this front end, and what is known of
all others.

Before the request is answered, the session log records that the response has begun. Its end takes the place of its
turn, so the log accepts only one end, whoever writes it. Between the two, a front end runs the response and tells the
others how far it is. If no front end runs it, it was lost with its front end: the one that is asked for it then writes
its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from fastapi import Depends, Request
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.responses.replayable_turn import NOTHING_YET, ReplayableTurn, ending
from serving.front.api.responses.store import StoredResponse, find_response, note_begun, note_ended
from serving.front.api.service import TurnService
from serving.front.api.turn_streams import TurnPlan, open_turns
from serving.wire.errors import (
    SESSION_CLOSING,
    SESSION_NOT_FOUND,
    TURN_DIFFERS,
    TURN_IN_FLIGHT,
    error_info,
    unavailable,
)
from serving.wire.turns import ErrorInfo, ServiceError, TextPrompt, TurnCall, TurnEvent, TurnFinish

MOST_IN_BACKGROUND = 256
CANCEL_TIMEOUT_S = 2.0
"""Less than the time that siblings have to answer."""
END_TIMEOUT_S = 5.0
NEWCOMER_GRACE_S = 10.0
"""How long the others may not know a front end that has just started, and the responses that it runs."""
PAUSE_S = 0.05
LOOK_INTERVAL_S = 0.5
"""How often a front end asks for news of a response that another one runs, for clients that listen here."""

LOST = ErrorInfo(500, "front_end_lost", "The front end that ran this response has ended.")
CANCELLED = TurnEvent(finish=TurnFinish("abort"))
_ENDED_OTHERWISE = frozenset({TURN_DIFFERS, SESSION_NOT_FOUND, SESSION_CLOSING})

Status = Literal["queued", "in_progress"]

logger = logging.getLogger(__name__)


class FrontEnds(Protocol):
    """All front ends of the cluster, including this one."""

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of all live front ends; empty if one of them does not answer."""


@dataclass(slots=True, eq=False)
class _Running:
    """A response that runs here. `work` runs the turn; `task` waits for `work` and writes the end to the session log.
    Breaking off cancels `work`."""

    call: TurnCall
    turn: ReplayableTurn
    work: asyncio.Task[None]
    task: asyncio.Task[None]
    broken_off: TurnEvent | None = None

    def break_off(self, end: TurnEvent) -> None:
        """Ends the response with `end`, unless it is just ending otherwise."""
        self.broken_off = self.broken_off or end
        self.work.cancel()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a response is that has no end in the log. `text`: what it has said after what the caller has seen."""

    status: Status
    text: str = ""
    in_thought: bool = False


class BackgroundResponses:
    """The background responses of this front end, at most `most` at a time. `front_ends` None: there are no others."""

    def __init__(self, front_ends: FrontEnds | None = None, *, most: int = MOST_IN_BACKGROUND) -> None:
        self._front_ends = front_ends
        self._most = most
        self._running: dict[tuple[str, str], _Running] = {}
        self._num_beginning = 0

    async def start(self, service: TurnService, plan: TurnPlan) -> ReplayableTurn:
        """Records in the log that the response has begun, then runs the plan's one turn in the background. Raises
        ServiceError: (429, "overloaded") if too many run."""
        if len(self._running) + self._num_beginning >= self._most:
            message = f"background: {self._most} responses run in the background already."
            raise ServiceError(ErrorInfo(429, "overloaded", message, "background", retry_after_s=1.0))
        (call,) = plan.calls
        assert call.session is not None
        self._num_beginning += 1
        try:
            session = await note_begun(service, call.session, call.tenant)
        finally:
            self._num_beginning -= 1
        call, turn = replace(call, session=session), ReplayableTurn()
        work = asyncio.create_task(_run(service, dataclasses.replace(plan, calls=[call]), turn))
        task = asyncio.create_task(self._see_to_end(service, call))
        self._running[call.tenant, call.request_id] = _Running(call, turn, work, task)
        return turn

    def running_turn(self, response_id: str, tenant: str) -> ReplayableTurn | None:
        """The turn of a response that runs here; None if it does not."""
        running = self._running.get((tenant, response_id))
        return None if running is None else running.turn

    async def here(
        self, response_id: str, tenant: str, num_seen: int, *, cancel: bool
    ) -> tuple[Status, str, bool] | None:
        """Called by other front ends, too: the Progress of a response, as plain data; None if it does not run here.
        With `cancel` its end is in the log when this returns, if the log answers in time."""
        running = self._running.get((tenant, response_id))
        if running is None:
            return None
        if cancel:
            running.break_off(CANCELLED)
            await asyncio.wait([running.task], timeout=CANCEL_TIMEOUT_S)
        turn = running.turn
        return ("in_progress" if turn.has_begun else "queued"), turn.text(num_seen), turn.in_thought

    async def progress(
        self, stored: StoredResponse, tenant: str, num_seen: int = 0, *, cancel: bool = False
    ) -> Progress | None:
        """How far the response is; None if no known front end runs it."""
        asked = (stored.head.id, tenant, num_seen)
        found = await self.here(*asked, cancel=cancel)
        if found is None and self._front_ends is not None:
            answers = await self._front_ends.ask("background_response", *asked, cancel)
            if not answers:
                return Progress("in_progress")
            found = next(filter(None, answers), None)
            is_new = time.time() - stored.head.created_at < NEWCOMER_GRACE_S
            if found is None and is_new and not cancel:
                return Progress("queued")
        return None if found is None else Progress(*found)

    async def stop(self, *, patience_s: float, timeout_s: float) -> None:
        """Gives running responses `patience_s` to end, then breaks them off and waits at most `timeout_s` for their
        ends to be logged."""
        running = list(self._running.values())
        if not running:
            return
        tasks = [each.task for each in running]
        await asyncio.wait(tasks, timeout=patience_s)
        for each in running:
            each.break_off(TurnEvent(error=LOST))
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()

    async def _see_to_end(self, service: TurnService, call: TurnCall) -> None:
        running = self._running[call.tenant, call.request_id]
        try:
            await asyncio.wait([running.work])
            end = _unfinished(running)
            if end is not None:
                end = await _told_to_log(service, call, running.turn.broken_off(end))
            running.turn.finish(end)
        finally:
            running.work.cancel()
            del self._running[call.tenant, call.request_id]


async def _run(service: TurnService, plan: TurnPlan, turn: ReplayableTurn) -> None:
    async with open_turns(service, plan) as events:
        async for _, event in events:
            turn.add(event)


def _unfinished(running: _Running) -> TurnEvent | None:
    """How a turn ended whose end is not in the log; None if it is there."""
    if running.work.cancelled():
        return running.broken_off or TurnEvent(error=LOST)
    error = running.work.exception()
    if error is None:
        finish = running.turn.finished_by
        return TurnEvent(finish=finish) if finish is not None and finish.reason == "abort" else None
    if not isinstance(error, ServiceError):
        logger.error("response %s broke off", running.call.request_id, exc_info=error)
    return TurnEvent(error=error_info(error))


async def _told_to_log(service: TurnService, call: TurnCall, end: TurnEvent) -> TurnEvent:
    """Writes the end to the log, unless the log has one. Returns the end that the log has now."""
    try:
        stored = await find_response(service, call.request_id, call.tenant)
        if stored.end is None:
            await end_response(service, stored, end, call.tenant)
            stored = await find_response(service, call.request_id, call.tenant)
        return stored.end or end
    except ServiceError as error:  # The next front end that is asked for the response gives it an end.
        logger.warning("response %s: its end may not be in the log: %s", call.request_id, error)
        return end


async def end_response(service: TurnService, stored: StoredResponse, end: TurnEvent, tenant: str) -> None:
    """Gives the response this end, unless it has one. If its turn is still in flight, waits for it for END_TIMEOUT_S.
    Raises ServiceError."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + END_TIMEOUT_S
    while True:
        try:
            await note_ended(service, stored, end, tenant)
        except ServiceError as error:
            if error.info.code in _ENDED_OTHERWISE:
                return
            if error.info.code != TURN_IN_FLIGHT or loop.time() > deadline_s:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return


async def look_up(
    service: TurnService,
    background: BackgroundResponses,
    response_id: str,
    tenant: str,
    num_seen: int = 0,
) -> tuple[StoredResponse, Progress | None]:
    """The response, and how far it is unless it has ended. A response that was lost is given its end: it has failed.
    Raises ServiceError."""
    stored = await find_response(service, response_id, tenant)
    if stored.end is not None:
        return stored, None
    progress = await background.progress(stored, tenant, num_seen)
    if progress is not None:
        return stored, progress
    try:
        await note_ended(service, stored, TurnEvent(error=LOST), tenant)
    except ServiceError as error:
        if error.info.code == TURN_IN_FLIGHT:  # Its front end has just gone; its replica will notice.
            return stored, Progress("in_progress")
        if error.info.code not in _ENDED_OTHERWISE:
            raise
    stored = await find_response(service, response_id, tenant)
    return stored, None if stored.end is not None else Progress("in_progress")


async def cancel(
    service: TurnService, background: BackgroundResponses, response_id: str, tenant: str
) -> StoredResponse:
    """Cancels the response, unless it has ended already; returns it with its end. Raises ServiceError."""
    stored = await find_response(service, response_id, tenant)
    if not stored.head.is_background:
        raise refusal("Only a response that is made in the background can be cancelled.", "response_id")
    if stored.end is None:
        await background.progress(stored, tenant, cancel=True)
        stored = await find_response(service, response_id, tenant)
    if stored.end is None:
        # The front end that ran it is gone, or does not answer.
        await service.abort(response_id, tenant=tenant)
        with suppress(ServiceError):
            await end_response(service, stored, CANCELLED, tenant)
        stored = await find_response(service, response_id, tenant)
    if stored.end is None:
        raise ServiceError(unavailable(f"response {response_id!r} could not be cancelled yet"))
    return stored


@dataclass(frozen=True, slots=True)
class FollowedTurn:
    """The turn of a response (RunsTurns), as told by the front end that runs it, or by the log."""

    service: TurnService
    background: BackgroundResponses
    response_id: str
    tenant: str

    @property
    def call(self) -> TurnCall:
        """Stands for the call of the response in a plan. It says nothing: the turn was begun by another call."""
        return TurnCall(self.response_id, TextPrompt(""), SamplingParams(), tenant=self.tenant)

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        turn = self.background.running_turn(self.response_id, self.tenant)
        if turn is None:
            yield self._told()
            return
        async with turn.run(call) as events:
            yield events

    async def _told(self) -> AsyncIterator[TurnEvent]:
        yield NOTHING_YET
        num_seen = 0
        while True:
            stored, progress = await look_up(
                self.service, self.background, self.response_id, self.tenant, num_seen
            )
            if progress is None:
                assert stored.end is not None
                for event in ending(stored.end, stored.end.text[num_seen:]):
                    yield event
                return
            if progress.text:
                num_seen += len(progress.text)
                yield TurnEvent(text=progress.text, in_thought=progress.in_thought)
            await asyncio.sleep(LOOK_INTERVAL_S)


async def get_background(request: Request) -> BackgroundResponses:
    background: BackgroundResponses = request.app.state.background
    return background


Background = Annotated[BackgroundResponses, Depends(get_background)]
