"""Sends a call to the replica that owns its session. If it is lost, also in mid-stream, another replica takes over.

If the client has received nothing of an attempt, the turn is repeated from its start. Otherwise the next replica goes
on from the exact tokens that the client has received: two replicas need not round alike.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from controllers.errors import ControllerError, ModelChanged, NoReplica, StoreError
from controllers.records import COUNTED_KEY, TREE_KEY, Assignment
from controllers.session_keys import named, new_session_id, tenant_in
from controllers.session_log.kept_answers import CALL_KEY
from serving.front.dispatched_turn import ABORT_TIMEOUT_S, DispatchedTurn, TurnAborted
from serving.front.known_places import NOWHERE, KnownPlaces
from serving.front.ownership_cache import Owner, OwnershipCache
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
from serving.front.replica_calls import ANY_REPLICA, ReplicaCalls
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.logs.call_facts import CALL_FACTS, CallFacts
from serving.trace.turn_traces import UNTRACED, FrontTraces
from serving.watch.metrics import FailoverCause, IngressMetrics
from serving.wire.calls import Abort, AnyCall
from serving.wire.controller_calls import ControllerCalls
from serving.wire.errors import SESSION_MOVED, error_info
from serving.wire.turns import ErrorInfo, ServiceError, TurnCall, TurnEvent

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_PAUSE_S = 0.05
LOG_PAUSE_S = 0.25
"""Between tries while the session log or the controller does not answer."""
NO_ANSWER = ErrorInfo(500, "internal_error", "the turn ended without an answer")
BROKEN_OFF = ErrorInfo(500, "internal_error", "the answer broke off")
MOST_TAKEOVERS = 3
"""How often another replica may go on with a turn: its session may also move again and again."""


class Opening(NamedTuple):
    """Whether a session that does not exist is opened, at the `preferred` replica if its load allows it, and with which
    idle timeout (None: the default)."""

    create: bool = False
    preferred: str | None = None
    timeout_s: float | None = None


NO_OPENING = Opening()


@dataclass(slots=True)
class Attempt:
    """A call that a replica has begun to answer."""

    replica_id: str
    first: TurnEvent
    rest: AsyncIterator[TurnEvent]


class TurnDispatcher:
    """Brings turns to replicas, and fails over. A call searches for a replica for at most `failover_timeout_s`."""

    def __init__(
        self,
        replicas: ReplicaCalls,
        controller: ControllerCalls,
        owners: OwnershipCache,
        places: KnownPlaces,
        metrics: IngressMetrics,
        *,
        failover_timeout_s: float,
        traces: FrontTraces = UNTRACED,
    ) -> None:
        self._replicas = replicas
        self._controller = controller
        self._owners = owners
        self._places = places
        self._metrics = metrics
        self._failover_timeout_s = failover_timeout_s
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

    async def open_session(
        self,
        session_id: str | None,
        tenant: str,
        timeout_s: float | None,
        capacity_tokens: int | None,
        *,
        tree: bool = False,
    ) -> str:
        """Registers and places a session; returns its key. Without a `session_id` it gets a new one. `tree`: it is a
        tree of requests and takes no turns. Waits while there is no replica or the session log does not answer. Raises
        ServiceError."""
        if session_id is None:  # chosen once: a try whose answer was lost may have opened it
            session_id = new_session_id()
        open_key = (TREE_KEY if tree else "") + uuid.uuid4().hex
        open_it = partial(
            self._controller.open_session, session_id, tenant, timeout_s, capacity_tokens, open_key
        )
        assignment = await self._once_placed(open_it, _now_s() + self._failover_timeout_s)
        self._owners.put(assignment.session_id, _owner_in(assignment))
        return assignment.session_id

    async def ask_owner(self, key: str, call_at: Callable[[int], AnyCall]) -> Any:
        """Makes the call `call_at(epoch)` at the session's owner and returns the answer. If the owner changes
        meanwhile, the new owner is asked, so the call must be repeatable. Raises ServiceError."""
        deadline_s = _now_s() + self._failover_timeout_s
        failed = asked_anew = False
        while True:
            owner = await self._find(key, deadline_s)
            try:
                return await self._replicas.call(owner.replica_id, call_at(owner.epoch))
            except ReplicaGone as gone:
                refusal = GONE
                await self._report(gone)
                failed = True
            except ReplicaLate as late:  # it still owns the session, and may still do what it was asked
                await self._pause(deadline_s, late.info)
                continue
            except ServiceError as error:
                refusal = error.info
            if refusal.code in LOG_AWAY:
                await self._pause(deadline_s, refusal)
                continue
            self.forget(key)
            if refusal.code in LET_GO and not asked_anew:
                asked_anew = True
                continue
            if not is_retried(refusal, failed):
                raise ServiceError(refusal)
            self._metrics.failed_over(failover_cause(refusal))
            await self._pause(deadline_s, refusal)

    async def once_log_answers(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, which must be repeatable. While the session log does not answer, `ask` is called again,
        for at most `failover_timeout_s`. Raises what `ask` raises."""
        deadline_s = _now_s() + self._failover_timeout_s
        while True:
            try:
                return await ask()
            except StoreError as error:
                await self._pause(deadline_s, error_info(error))

    async def owner_of(self, key: str, opening: Opening = NO_OPENING) -> Owner:
        """The session's owner, from the cache or the controller, which opens it as `opening` says. Raises
        ControllerError."""
        owner = self._owners.get(key)
        if owner is None:
            self._metrics.looked_up()
            assignment = await self._controller.resolve(
                key, opening.create, tenant_in(key), opening.preferred, opening.timeout_s
            )
            owner = _owner_in(assignment)
            self._owners.put(key, owner)
        return owner

    def forget(self, key: str) -> None:
        self._owners.forget(key)

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
                    await self._close_unheld(session.session_id)
        turn.call = replace(turn.call, session=None)
        turn.facts.session_id = ""
        return await self._start(turn, replace(call, session=None), stack)

    def _has_another(self, turn: DispatchedTurn, key: str) -> bool:
        """Whether another turn of this front end is in the session."""
        others = (each.call.session for each in self._turns if each is not turn)
        return any(session is not None and session.session_id == key for session in others)

    async def _close_unheld(self, key: str) -> None:
        """Closes a session that its owner could not take."""
        owner = self._owners.get(key)
        if owner is None:
            return
        self.forget(key)
        try:
            await self._controller.close_session(key, None, None, owner.open_key)
        except ControllerError as error:
            logger.warning("%s was not closed: %r", named(key), error)

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
        deadline_s = _now_s() + self._failover_timeout_s
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
                    self._metrics.found_moved(_now_s() - moved_s)
                return answer
            if isinstance(answer, ReplicaGone):
                refusal = GONE
                await self._report(answer)
                if answer.had_call:
                    turn.lose(answer.replica_id)
                failed, call = True, _for_living_session(call, owner)
            else:
                refusal = answer
                if refusal.code == ENGINE_STOPPED:
                    turn.lose(replica_id)
            if refusal.code in LOG_AWAY:
                await self._pause(deadline_s, refusal)
                continue
            if refusal.code == SESSION_MOVED and moved_s is None:
                moved_s = _now_s()
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
            await self._pause(deadline_s, refusal)

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
        if session.create and self._owners.get(session.session_id) is None:
            preferred = self._replicas.preferred(self._places.affinity(call))
        opening = Opening(session.create, preferred, session.timeout_s)
        return await self._find(session.session_id, deadline_s, opening)

    async def _find(self, key: str, deadline_s: float, opening: Opening = NO_OPENING) -> Owner:
        """The session's owner. Waits, and raises ServiceError, as `_once_placed` does."""
        return await self._once_placed(partial(self.owner_of, key, opening), deadline_s)

    async def _once_placed(self, place: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """The result of `place`, which must be repeatable. While no replica can take the session, or the session log
        does not answer, `place` is called again. Raises ServiceError."""
        while True:
            try:
                return await place()
            except (NoReplica, StoreError) as error:
                await self._pause(deadline_s, error_info(error))
            except ControllerError as error:
                raise ServiceError(error_info(error)) from error

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
                await self._report(gone)
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
        lost_s = _now_s()
        call = turn.call
        if call.session is not None:
            self.forget(call.session.session_id)
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
            self._metrics.taken_over(_now_s() - lost_s)
            turn.trace.taken_over(attempt.replica_id)
        return attempt

    async def _report(self, gone: ReplicaGone) -> None:
        """Tells the controller what was seen of the replica. The controller decides what that means, and when its
        sessions move."""
        if gone.replica_id == ANY_REPLICA:
            return
        try:
            ended = await self._controller.report_unreachable(gone.replica_id, gone.loss is Loss.DIED)
        except ControllerError as error:
            logger.warning("replica %s: %s; the controller was not told: %s", *_seen(gone), error)
            return
        logger.warning("replica %s: %s%s", *_seen(gone), "; its sessions move" if ended else "")
        if ended:
            self._owners.forget_replica(gone.replica_id)
            self._places.forget_replica(gone.replica_id)

    async def _pause(self, deadline_s: float, reason: ErrorInfo) -> None:
        pause_s = LOG_PAUSE_S if reason.code in LOG_AWAY else RETRY_PAUSE_S
        if _now_s() + pause_s > deadline_s:
            raise ServiceError(reason)
        await asyncio.sleep(pause_s)


def _now_s() -> float:
    """The event loop's time, in monotonic seconds."""
    return asyncio.get_running_loop().time()


def _seen(gone: ReplicaGone) -> tuple[str, str]:
    return gone.replica_id, gone.loss.value


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


def _owner_in(assignment: Assignment) -> Owner:
    opened_s = None if assignment.age_s is None else _now_s() - assignment.age_s
    return Owner(assignment.replica_id, assignment.epoch, assignment.open_key, opened_s)


def _with_key(call: TurnCall) -> TurnCall:
    """Gives a turn without an idempotency key one of its own. Then repeats of this call are recognized and nothing
    else, except the client's own next try if the client counts its tries."""
    session = call.session
    if session is None or session.idempotency_key is not None:
        return call
    prefix = CALL_KEY if session.retries is None else COUNTED_KEY
    return replace(call, session=replace(session, idempotency_key=f"{prefix}{uuid.uuid4().hex}"))
