"""Sends a call to the replica that owns its session. If it is lost, also in mid-stream, another replica takes over.

If the client has received nothing of an attempt, the turn is repeated from its start. Otherwise the next replica goes
on from the exact tokens that the client has received: two replicas need not round alike.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from controllers.errors import ModelChanged
from controllers.records import COUNTED_KEY
from controllers.session_log.kept_answers import CALL_KEY
from serving.front.dispatched_turn import ABORT_TIMEOUT_S, DispatchedTurn, TurnAborted
from serving.front.known_places import NOWHERE, KnownPlaces
from serving.front.ownership_cache import Owner
from serving.front.refusals import (
    ADAPTER_AWAY,
    CLIENTS_FAULTS,
    ENGINE_STOPPED,
    GONE,
    LET_GO,
    LOG_AWAY,
    LOST,
    REFUSED_BY_SESSION,
    RETRIED_CODES,
    failover_cause,
    is_retried,
)
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_gone import ReplicaGone
from serving.front.session_owners import Opening, SessionOwners, now_s
from serving.logs.call_facts import CALL_FACTS, CallFacts
from serving.trace.turn_traces import UNTRACED, FrontTraces
from serving.watch.metrics import FailoverCause, IngressMetrics
from serving.wire.calls import Abort
from serving.wire.errors import SESSION_MOVED
from serving.wire.turns import ErrorInfo, ServiceError, TurnCall, TurnEvent

logger = logging.getLogger(__name__)

NO_ANSWER = ErrorInfo(500, "internal_error", "the turn ended without an answer")
BROKEN_OFF = ErrorInfo(500, "internal_error", "the answer broke off")
MOST_TAKEOVERS = 3
"""How often another replica may go on with a turn: its session may also move again and again."""


@dataclass(slots=True)
class Attempt:
    """A call that a replica has begun to answer."""

    replica_id: str
    first: TurnEvent
    rest: AsyncIterator[TurnEvent]


class TurnDispatcher:
    """Brings turns to replicas, and fails over."""

    def __init__(
        self,
        replicas: ReplicaCalls,
        owners: SessionOwners,
        places: KnownPlaces,
        metrics: IngressMetrics,
        *,
        traces: FrontTraces = UNTRACED,
    ) -> None:
        self._replicas = replicas
        self._owners = owners
        self._places = places
        self._metrics = metrics
        self._traces = traces
        self._turns: set[DispatchedTurn] = set()

    @asynccontextmanager
    async def dispatch(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        """The turn's events; the first has already arrived. `call` names its session by its key. Raises ServiceError if
        the turn was refused."""
        facts = CALL_FACTS.get() or CallFacts()
        facts.begin(call)
        if facts.request_id:
            call = replace(call, http_request_id=facts.request_id)
        with self._traces.turn(call) as trace:
            turn = DispatchedTurn(_with_key(call), trace, facts)
            self._turns.add(turn)
            try:
                async with AsyncExitStack() as stack:
                    attempt = await self._begin(turn, turn.call, stack)
                    async with aclosing(self._events(turn, attempt, stack)) as events:
                        yield events
            finally:
                self._turns.remove(turn)

    def abort(self, request_id: str | None, tenant: str) -> None:
        """Aborts the tenant's turn `request_id` (None: all the tenant's turns) while no replica has it. The caller
        tells the replicas afterwards. If a replica answers such a turn later, the dispatcher tells the replicas again.
        """
        for turn in self._turns:
            if turn.call.named(request_id, tenant):
                turn.abort()

    async def _begin(self, turn: DispatchedTurn, call: TurnCall, stack: AsyncExitStack) -> Attempt | None:
        """An attempt, as in `_start`. A turn that its session does not take runs without the session, if that is its
        fallback."""
        session = call.session
        if session is None or session.fallback != "unnamed":
            return await self._start(turn, call, stack)
        if not self._has_another(turn, session.session_id):
            try:
                return await self._start(turn, call, stack)
            except ServiceError as error:
                if error.info.code not in REFUSED_BY_SESSION:
                    raise
                if error.info.code == ModelChanged.code:  # the next turn opens it anew
                    await self._owners.close_unheld(session.session_id)
        turn.call = replace(turn.call, session=None)
        turn.facts.session_id = ""
        return await self._start(turn, replace(call, session=None), stack)

    def _has_another(self, turn: DispatchedTurn, key: str) -> bool:
        """Whether another turn of this front end is in the session."""
        others = (each.call.session for each in self._turns if each is not turn)
        return any(session is not None and session.session_id == key for session in others)

    async def _start(self, turn: DispatchedTurn, call: TurnCall, stack: AsyncExitStack) -> Attempt | None:
        """The attempt at the first replica that answers `call`; None if the turn was aborted before that. Raises
        ServiceError."""
        try:
            async with turn.search():
                attempt = await self._find_taker(turn, call, stack)
        except TurnAborted:
            return None
        if turn.aborted:
            # The abort may have reached the replica before the call did.
            await self._replicas.broadcast(Abort(call.request_id, call.tenant), ABORT_TIMEOUT_S)
        return attempt

    async def _find_taker(self, turn: DispatchedTurn, call: TurnCall, stack: AsyncExitStack) -> Attempt:
        """Tries replicas until one answers; then `stack` holds its stream. Raises ServiceError."""
        deadline_s = self._owners.deadline_s()
        failed, asked_anew = call.resumed is not None, False
        moved_s: float | None = None
        while True:
            with turn.trace.placing():
                owner = await self._owner_for(call, deadline_s)
                if owner is None:
                    affinity = NOWHERE if failed else self._places.affinity(call)
                    replica_id, epoch = await self._replicas.pick(affinity, turn.without_adapter), None
                else:
                    call = _unbound_if_older(call, turn, owner)
                    replica_id, epoch = owner.replica_id, owner.epoch
            answer = await self._ask(turn, call, replica_id, epoch, stack)
            if isinstance(answer, Attempt):
                self._places.note(call, replica_id)
                if moved_s is not None:
                    self._metrics.found_moved(now_s() - moved_s)
                return answer
            if isinstance(answer, ReplicaGone):
                refusal = GONE
                await self._owners.report(answer)
                if answer.had_call:
                    turn.lose(answer.replica_id)
                failed, call = True, _for_living_session(call, owner)
            else:
                refusal = answer
                if refusal.code == ENGINE_STOPPED:
                    turn.lose(replica_id)
            if refusal.code in LOG_AWAY:
                await self._owners.pause(deadline_s, refusal)
                continue
            if refusal.code == SESSION_MOVED and moved_s is None:
                moved_s = now_s()
            if refusal.code in LET_GO and call.session is not None and not asked_anew:
                # The cached owner no longer has the session (moved, timed out, closed elsewhere): ask the controller.
                self._owners.forget(call.session.session_id)
                asked_anew = True
                continue
            waits = failed and (call.session is None or call.session.fallback != "unnamed")
            elsewhere = self._goes_elsewhere(turn, call, replica_id, refusal)
            if not elsewhere and not is_retried(refusal, waits, in_mid_stream=call.resumed is not None):
                raise ServiceError(refusal)
            if call.session is not None:
                self._owners.forget(call.session.session_id)
            self._metrics.failed_over(failover_cause(refusal))
            turn.trace.failed_over(refusal.code)
            await self._owners.pause(deadline_s, refusal)

    async def _ask(
        self, turn: DispatchedTurn, call: TurnCall, replica_id: str, epoch: int | None, stack: AsyncExitStack
    ) -> Attempt | ErrorInfo | ReplicaGone:
        """An attempt at one replica, whose stream `stack` then holds, or why there is none. Raises ServiceError."""
        turn.facts.replica_id, turn.facts.epoch = replica_id, epoch
        async with AsyncExitStack() as entered:
            entered.enter_context(turn.trace.at(replica_id, epoch))
            carried = turn.trace.carried(call)
            try:
                stream = await entered.enter_async_context(self._replicas.turn(replica_id, carried, epoch))
                first = await anext(stream)
            except ReplicaGone as gone:
                turn.trace.ended_there(GONE.code)
                return gone
            except StopAsyncIteration:
                raise ServiceError(NO_ANSWER) from None
            if first.error is not None:
                turn.trace.ended_there(first.error.code)
                return first.error
            stack.push_async_exit(entered.pop_all())
            return Attempt(replica_id, first, stream)

    def _goes_elsewhere(
        self, turn: DispatchedTurn, call: TurnCall, replica_id: str, refusal: ErrorInfo
    ) -> bool:
        """Whether a call that the replica refused for its adapter has another replica to try. Each is tried once. A
        session's turns can only go to its owner."""
        if refusal.code not in ADAPTER_AWAY:
            return False
        turn.without_adapter.add(replica_id)
        return call.session is None and self._replicas.has_other(turn.without_adapter)

    async def _owner_for(self, call: TurnCall, deadline_s: float) -> Owner | None:
        """The owner of the call's session; None for a call without a session."""
        session = call.session
        if session is None:
            return None
        preferred = None
        if session.create and self._owners.remembered(session.session_id) is None:
            preferred = self._replicas.preferred(self._places.affinity(call))
        opening = Opening(session.create, preferred, session.timeout_s)
        return await self._owners.find(session.session_id, deadline_s, opening)

    async def _events(
        self, turn: DispatchedTurn, attempt: Attempt | None, stack: AsyncExitStack
    ) -> AsyncGenerator[TurnEvent, None]:
        """The events of the whole turn, from one replica or several. `stack` holds the current replica's stream."""
        for takeovers_left in range(MOST_TAKEOVERS, -1, -1):
            if attempt is None:
                yield turn.progress.aborted()
                return
            failure = BROKEN_OFF
            event: TurnEvent | None = attempt.first
            try:
                while event is not None:
                    if event.error is not None and event.error.code in RETRIED_CODES:
                        failure = event.error
                        break
                    unsent = turn.progress.unsent(event)
                    if unsent is not None:
                        turn.facts.tell(unsent)
                        turn.trace.tell(unsent)
                        yield unsent
                    if event.finish is not None or event.error is not None:
                        return
                    event = await anext(attempt.rest, None)
            except ReplicaGone as gone:
                failure = LOST
                await self._owners.report(gone)
            turn.trace.ended_there(failure.code)
            await stack.aclose()
            try:
                if failover_cause(failure) is FailoverCause.LOST:
                    turn.lose(attempt.replica_id)
                if failure is BROKEN_OFF or not takeovers_left:
                    raise ServiceError(failure)
                self._metrics.failed_over(failover_cause(failure))
                turn.trace.failed_over(failure.code)
                attempt = await self._take_over(turn, stack)
            except ServiceError as error:
                ending = TurnEvent(error=error.info)
                turn.trace.tell(ending)
                yield ending
                return

    async def _take_over(self, turn: DispatchedTurn, stack: AsyncExitStack) -> Attempt | None:
        """Continues the turn at another replica, after what the client has; None if it was aborted. Raises
        ServiceError."""
        lost_s = now_s()
        call = turn.call
        if call.session is not None:
            self._owners.forget(call.session.session_id)
        resumed = replace(_for_living_session(call), resumed=turn.progress.begin_again())
        try:
            attempt = await self._begin(turn, resumed, stack)
        except ServiceError as error:
            # The call was valid when it began: whatever is wrong with it now, its client cannot correct.
            if error.info.status in CLIENTS_FAULTS:
                logger.warning("request %s cannot go on elsewhere: %s", call.request_id, error.info.message)
                raise ServiceError(LOST) from error
            raise
        if attempt is not None:
            self._metrics.taken_over(now_s() - lost_s)
            turn.trace.taken_over(attempt.replica_id)
        return attempt


def _for_living_session(call: TurnCall, owner: Owner | None = None) -> TurnCall:
    """The call, bound to the session that exists now. It was begun and may have been committed: if its session has been
    closed since, the call must not open it again, nor run in a later session of the same name."""
    session = call.session
    if session is None:
        return call
    open_key = session.open_key or (None if owner is None else owner.open_key)
    return replace(call, session=replace(session, create=False, open_key=open_key))


def _unbound_if_older(call: TurnCall, turn: DispatchedTurn, owner: Owner) -> TurnCall:
    """The call, no longer bound to an earlier session of that name if the present one was open when the turn came: the
    owner that was remembered then was out of date, and the turn cannot have been committed in the earlier session."""
    session = call.session
    if session is None or session.open_key in (None, owner.open_key):
        return call
    if owner.opened_s is None or owner.opened_s > turn.came_s:
        return call
    return replace(call, session=turn.call.session)


def _with_key(call: TurnCall) -> TurnCall:
    """Gives a turn without an idempotency key one of its own. Then repeats of this call are recognized and nothing
    else, except the client's own next try if the client counts its tries."""
    session = call.session
    if session is None or session.idempotency_key is not None:
        return call
    prefix = CALL_KEY if session.retries is None else COUNTED_KEY
    return replace(call, session=replace(session, idempotency_key=f"{prefix}{uuid.uuid4().hex}"))
