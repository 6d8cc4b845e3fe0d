"""Calls to the cluster controller actor: bounded in time, repeated while the actor restarts, typed errors unwrapped.

The actor's methods are safe to repeat (see controllers/cluster_actor.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from controllers.cluster_actor import get_or_create_controller, version_of
from controllers.commit_groups import CommitGroups, Outcome
from controllers.errors import ControllerError, NoAnswer, SettingsRefused
from controllers.records import (
    Assignment,
    ForkOrder,
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionReport,
    TurnRecord,
)
from controllers.settings import Deployment
from controllers.wire_record import WIRE_VERSION
from serving.settings.strict_settings import SettingsError

logger = logging.getLogger(__name__)

CONTROLLER_TIMEOUT_S = 15.0
NAMESPACE = "kedge"
RETRY_PAUSE_S = 0.2
GROUP_PATIENCE_S = 0.5
"""So long a call with turns that gets no answer keeps the next turns waiting. The controller may be starting again, and
then all go as soon as it is there."""


class ControllerCalls:
    """Raises the controller's own ControllerErrors, which are its answers; NoAnswer if it gave none in `timeout_s`.

    `connect` gives the actor's handle and creates the actor if there is none: one that died for good (its log could
    not be opened) is tried again. `deployment` is the one of the application that the caller is a part of.

    A controller outlives deployments, and may be of an earlier version of Kedge. With a `deployment`, whoever calls
    it first replaces it by one of this version: everything is in the log, and all others connect again.
    """

    def __init__(
        self, connect: Callable[[], ActorHandle], *, timeout_s: float, deployment: Deployment | None = None
    ) -> None:
        self._connect = connect
        self._actor = connect()
        self._is_current = deployment is None
        self._timeout_s = timeout_s
        self._deployment = deployment
        self._commits = CommitGroups(self._commit_turns, patience_s=GROUP_PATIENCE_S)

    async def announce(self) -> None:
        """Lets the settings of the caller's deployment take effect, if it is the newest. Raises SettingsRefused."""
        if self._deployment is not None:
            await self._call("announce", self._deployment)

    async def link_secret(self) -> bytes:
        """What the cluster's processes share (serving/wire/link_keys.py)."""
        return cast(bytes, await self._call("link_secret"))

    async def register_replica(self, status: ReplicaStatus) -> None:
        await self._call("register_replica", status)

    async def heartbeat(self, status: ReplicaStatus, report: SessionReport) -> HeartbeatReply:
        return cast(HeartbeatReply, await self._call("heartbeat", status, report))

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        return bool(await self._call("report_unreachable", replica_id, died))

    async def drain_replica(self, replica_id: str) -> None:
        await self._call("drain_replica", replica_id)

    async def deregister_replica(self, replica_id: str) -> int:
        return int(await self._call("deregister_replica", replica_id))

    async def open_session(
        self,
        session_id: str | None,
        tenant: str,
        timeout_s: float | None,
        capacity_tokens: int | None,
        open_key: str,
    ) -> Assignment:
        reply = await self._call("open_session", session_id, tenant, timeout_s, capacity_tokens, open_key)
        return cast(Assignment, reply)

    async def fork_session(
        self, parent_id: str, epoch: int, replica_id: str, order: ForkOrder
    ) -> SessionRecord:
        return cast(SessionRecord, await self._call("fork_session", parent_id, epoch, replica_id, order))

    async def resolve(self, session_id: str, create: bool, tenant: str) -> Assignment:
        return cast(Assignment, await self._call("resolve", session_id, create, tenant))

    async def load_session(self, session_id: str, epoch: int, replica_id: str) -> SessionRecord:
        return cast(SessionRecord, await self._call("load_session", session_id, epoch, replica_id))

    async def offer_session(self, session_id: str, epoch: int, replica_id: str) -> bool:
        return bool(await self._call("offer_session", session_id, epoch, replica_id))

    async def commit_turn(self, record: TurnRecord) -> None:
        """What comes while a call with turns is under way goes with the next: a call costs the controller several times
        what a turn does."""
        (refusal,) = await self._commits.commit([record])
        if refusal is not None:
            raise refusal

    async def close_session(
        self,
        session_id: str,
        tenant: str | None = None,
        epoch: int | None = None,
        open_key: str | None = None,
    ) -> bool:
        return bool(await self._call("close_session", session_id, tenant, epoch, open_key))

    async def close_after(self, session_id: str, epoch: int, turn_key: str) -> None:
        await self._call("close_after", session_id, epoch, turn_key)

    async def expire_idle(self) -> list[str]:
        return cast(list[str], await self._call("expire_idle"))

    async def sessions(self, tenant: str | None, after: str | None, limit: int) -> list[LedgerEntry]:
        return cast(list[LedgerEntry], await self._call("sessions", tenant, after, limit))

    async def session(self, session_id: str) -> LedgerEntry:
        return cast(LedgerEntry, await self._call("session", session_id))

    async def replicas(self) -> list[ReplicaStatus]:
        return cast(list[ReplicaStatus], await self._call("replicas"))

    async def stats(self) -> dict[str, float]:
        return cast(dict[str, float], await self._call("stats"))

    async def _commit_turns(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        return cast(Sequence[Outcome], await self._call("commit_turns", records))

    async def _call(self, method: str, *args: Any) -> Any:
        last: list[RayActorError] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._until_up(method, args, last)
        except TimeoutError:
            raise NoAnswer(
                f"the cluster controller did not answer {method} in {self._timeout_s} s",
                detail=_cause(last[-1]) if last else None,
            ) from None

    async def _until_up(self, method: str, args: tuple[Any, ...], last: list[RayActorError]) -> Any:
        while True:
            try:
                actor = await self._current_actor()
                return await getattr(actor, method).remote(*args)
            except RayTaskError as error:
                if isinstance(error.cause, ControllerError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                last[:] = [error]
                await asyncio.sleep(RETRY_PAUSE_S)
                if isinstance(error, ActorDiedError):
                    logger.warning("the cluster controller died; starting it again: %s", error)
                    self._connect_again()

    async def _current_actor(self) -> ActorHandle:
        """The controller, once it is of this version or a later one. One of an earlier version is replaced."""
        while not self._is_current:
            actor = self._actor
            version = await version_of(actor)
            if actor is not self._actor:
                continue  # another call has connected again meanwhile
            self._is_current = version >= WIRE_VERSION
            if not self._is_current:
                logger.warning("the cluster controller is of an earlier version (%d); replacing it", version)
                ray.kill(actor, no_restart=True)
                self._connect_again()  # at once: replicas of the earlier version start theirs again
        return self._actor

    def _connect_again(self) -> None:
        """What answers to the name now may be of any version."""
        self._actor = self._connect()
        self._is_current = self._deployment is None


def _cause(error: RayActorError) -> str:
    """The end of what Ray tells of it, which may be a whole traceback."""
    return str(error).rstrip().rpartition("\n")[2]


def connect_controller(name: str, deployment: Deployment) -> ControllerCalls:
    """Calls to the cluster controller of that name, which is created if there is none."""
    return ControllerCalls(
        lambda: get_or_create_controller(name, NAMESPACE, deployment.settings, deployment.log),
        timeout_s=CONTROLLER_TIMEOUT_S,
        deployment=deployment,
    )


def announce_at_deploy(name: str, deployment: Deployment) -> None:
    """Tells a controller that runs already of the deployment, before anything of it starts: so deployments count in the
    order in which they were made, and one that the controller refuses leaves the application as it is. A controller of
    an earlier version is told, too, by keyword: a handle to one of version 1 may take no positional arguments. It is
    replaced when the new deployment's processes start.

    Without a Ray cluster, or with a controller that does not answer, its replicas announce it when they start. Raises
    SettingsError.
    """
    if not ray.is_initialized():
        return
    try:
        controller = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return  # there is none
    try:
        ray.get(controller.announce.remote(deployment=deployment), timeout=CONTROLLER_TIMEOUT_S)
    except (RayTaskError, RayActorError, GetTimeoutError) as error:
        refusal = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(refusal, SettingsRefused):
            raise SettingsError(f"bad application settings:\n  args.{refusal.message}") from None
        logger.warning("the cluster controller was not told of the deployment: %s", error)
