"""Who owns which session, as a front end finds it out: from its memory or from the controller. Calls to owners."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from controllers.errors import ControllerError, NoReplica, SessionNotFound, StoreError
from controllers.records import TREE_KEY, Assignment
from controllers.session_keys import named, new_session_id, tenant_in
from serving.front.known_places import KnownPlaces
from serving.front.ownership_cache import Owner, OwnershipCache
from serving.front.refusals import GONE, LET_GO, LOG_AWAY, failover_cause, is_retried
from serving.front.replica_calls import ANY_REPLICA, ReplicaCalls
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.watch.metrics import IngressMetrics
from serving.wire.calls import AnyCall, CloseSession
from serving.wire.controller_calls import ControllerCalls
from serving.wire.errors import STALE_EPOCH, error_info
from serving.wire.turns import ErrorInfo, ServiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_PAUSE_S = 0.05
LOG_PAUSE_S = 0.25
"""Between tries while the session log or the controller does not answer."""


class Opening(NamedTuple):
    """Whether a session that does not exist is opened, at the `preferred` replica if its load allows it, and with which
    idle timeout (None: the default)."""

    create: bool = False
    preferred: str | None = None
    timeout_s: float | None = None


NO_OPENING = Opening()


class SessionOwners:
    """The owners of sessions. While there is no owner, or the session log does not answer, a call waits for at most
    `failover_timeout_s`. Used on the front end's event loop only."""

    def __init__(
        self,
        replicas: ReplicaCalls,
        controller: ControllerCalls,
        cache: OwnershipCache,
        places: KnownPlaces,
        metrics: IngressMetrics,
        *,
        failover_timeout_s: float,
    ) -> None:
        self._replicas = replicas
        self._controller = controller
        self._cache = cache
        self._places = places
        self._metrics = metrics
        self._failover_timeout_s = failover_timeout_s

    def deadline_s(self) -> float:
        """When a search that begins now has to end, by the event loop's time."""
        return now_s() + self._failover_timeout_s

    def remembered(self, key: str) -> Owner | None:
        return self._cache.get(key)

    async def owner_of(self, key: str, opening: Opening = NO_OPENING) -> Owner:
        """The session's owner, from the cache or the controller, which opens it as `opening` says. Raises
        ControllerError."""
        owner = self._cache.get(key)
        if owner is None:
            self._metrics.looked_up()
            assignment = await self._controller.resolve(
                key, opening.create, tenant_in(key), opening.preferred, opening.timeout_s
            )
            owner = _owner_in(assignment)
            self._cache.put(key, owner)
        return owner

    async def find(self, key: str, deadline_s: float, opening: Opening = NO_OPENING) -> Owner:
        """The session's owner. Waits, and raises ServiceError, as `_once_placed` does."""
        return await self._once_placed(partial(self.owner_of, key, opening), deadline_s)

    def forget(self, key: str) -> None:
        self._cache.forget(key)

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
        assignment = await self._once_placed(open_it, self.deadline_s())
        self._cache.put(assignment.session_id, _owner_in(assignment))
        return assignment.session_id

    async def ask(self, key: str, call_at: Callable[[int], AnyCall]) -> Any:
        """Makes the call `call_at(epoch)` at the session's owner and returns the answer. If the owner changes
        meanwhile, the new owner is asked, so the call must be repeatable. Raises ServiceError."""
        deadline_s = self.deadline_s()
        failed = asked_anew = False
        while True:
            owner = await self.find(key, deadline_s)
            try:
                return await self._replicas.call(owner.replica_id, call_at(owner.epoch))
            except ReplicaGone as gone:
                refusal = GONE
                await self.report(gone)
                failed = True
            except ReplicaLate as late:  # it still owns the session, and may still do what it was asked
                await self.pause(deadline_s, late.info)
                continue
            except ServiceError as error:
                refusal = error.info
            if refusal.code in LOG_AWAY:
                await self.pause(deadline_s, refusal)
                continue
            self.forget(key)
            if refusal.code in LET_GO and not asked_anew:
                asked_anew = True
                continue
            if not is_retried(refusal, failed):
                raise ServiceError(refusal)
            self._metrics.failed_over(failover_cause(refusal))
            await self.pause(deadline_s, refusal)

    async def once_log_answers(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, which must be repeatable. While the session log does not answer, `ask` is called again,
        for at most `failover_timeout_s`. Raises what `ask` raises."""
        deadline_s = self.deadline_s()
        while True:
            try:
                return await ask()
            except StoreError as error:
                await self.pause(deadline_s, error_info(error), error)

    async def close(self, key: str) -> bool:
        """Closes the session now, or when its turn in flight ends. False if there was none. Raises ControllerError and
        ServiceError."""
        opened = None
        self.forget(key)  # what is remembered does not say whether the session is still there
        try:
            opened = (await self.once_log_answers(partial(self.owner_of, key))).open_key
        except SessionNotFound:
            return False
        except NoReplica:
            pass
        await self.once_log_answers(partial(self._close, key, opened))
        return True

    async def close_unheld(self, key: str) -> None:
        """Closes a session that its owner could not take."""
        owner = self._cache.get(key)
        if owner is None:
            return
        self.forget(key)
        try:
            await self._controller.close_session(key, None, None, owner.open_key)
        except ControllerError as error:
            logger.warning("%s was not closed: %r", named(key), error)

    async def report(self, gone: ReplicaGone) -> None:
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
            self._cache.forget_replica(gone.replica_id)
            self._places.forget_replica(gone.replica_id)

    async def pause(self, deadline_s: float, reason: ErrorInfo, error: ControllerError | None = None) -> None:
        """Raises `reason` as a ServiceError if the time is up. `error` may say more, which is for the log only."""
        pause_s = LOG_PAUSE_S if reason.code in LOG_AWAY else RETRY_PAUSE_S
        if now_s() + pause_s > deadline_s:
            if error is not None:
                logger.warning("a call is given up: %s", error)
            raise ServiceError(reason)
        await asyncio.sleep(pause_s)

    async def _close(self, key: str, opened: str | None) -> None:
        """Closes the session that was opened with this key (None: not known) at its owner: then nothing of it is left
        there, and its turn ends. If there is no owner, the controller closes it. If it is there no more, an earlier try
        has closed it, whose answer was lost, or another call."""
        try:
            first = await self.owner_of(key)
            if opened not in (None, first.open_key):
                return  # a later session
            opened = first.open_key
            with suppress(ReplicaGone):
                if await self._close_at(first, key):
                    return
            owner = await self.owner_of(key)
            if owner != first and owner.open_key == opened and await self._close_at(owner, key):
                return
        except SessionNotFound:
            return
        except (NoReplica, ReplicaGone):
            pass
        finally:
            self.forget(key)
        await self._controller.close_session(key, None, None, opened)

    async def _close_at(self, owner: Owner, key: str) -> bool:
        """False if the replica does not have the session at that epoch, or no longer owns it. Raises StoreError if the
        session log could not be written, or the replica is late: then ask again, since only the owner knows whether a
        turn is in flight."""
        self.forget(key)
        try:
            return bool(await self._replicas.call(owner.replica_id, CloseSession(key, owner.epoch)))
        except ServiceError as error:
            if error.info.code in LOG_AWAY or isinstance(error, ReplicaLate):
                raise StoreError(error.info.message) from error
            if error.info.code != STALE_EPOCH:
                raise
        return False

    async def _once_placed(self, place: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """The result of `place`, which must be repeatable. While no replica can take the session, or the session log
        does not answer, `place` is called again. Raises ServiceError."""
        while True:
            try:
                return await place()
            except (NoReplica, StoreError) as error:
                await self.pause(deadline_s, error_info(error), error)
            except ControllerError as error:
                raise ServiceError(error_info(error)) from error


def now_s() -> float:
    """The event loop's time, in monotonic seconds."""
    return asyncio.get_running_loop().time()


def _seen(gone: ReplicaGone) -> tuple[str, str]:
    return gone.replica_id, gone.loss.value


def _owner_in(assignment: Assignment) -> Owner:
    opened_s = None if assignment.age_s is None else now_s() - assignment.age_s
    return Owner(assignment.replica_id, assignment.epoch, assignment.open_key, opened_s)
