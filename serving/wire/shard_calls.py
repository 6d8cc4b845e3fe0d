"""Calls to one controller actor, bounded in time and repeated while it restarts. Typed errors are unwrapped.

The actor's methods are safe to repeat (see controllers/cluster_actor.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from controllers.cluster_actor import ClusterController, version_of
from controllers.commit_groups import CommitGroups, Outcome
from controllers.errors import ControllerError, NoAnswer
from controllers.records import TurnRecord
from controllers.settings import Deployment
from controllers.wire_record import WIRE_VERSION
from serving.wire.commit_client import CommitClient

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.2
GROUP_PATIENCE_S = 0.5
"""How long an unanswered call that commits turns keeps the next turns waiting. After that they are sent too: if the
controller is restarting, all go through as soon as it is up."""


P = ParamSpec("P")
R = TypeVar("R")


def _called(
    method: Callable[Concatenate[ClusterController, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[ShardCalls, P], Coroutine[Any, Any, R]]:
    """A method of ShardCalls that calls this actor method, with the same signature."""

    @wraps(method)
    async def call(calls: ShardCalls, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, await calls._call(method.__name__, args, kwargs))

    return call


class ShardCalls:
    """Calls to a controller: the only one, or a shard (controllers/shards.py). They raise the controller's own
    ControllerErrors, and NoAnswer after `timeout_s`.

    `connect` returns the actor's handle and creates the actor if there is none. So an actor that died for good (because
    its log could not be opened) is tried again. `deployment` is that of the application that the caller belongs to.

    A controller outlives deployments and may be of an earlier version of Kedge. The first caller with a `deployment`
    then replaces it by a controller of this version: everything is in the log, and all other callers connect again.

    On node `node_id`, turns are committed over a connection of their own (None: by calls of the actor alone).
    """

    def __init__(
        self,
        connect: Callable[[], ActorHandle],
        *,
        timeout_s: float,
        deployment: Deployment | None = None,
        node_id: str | None = None,
    ) -> None:
        self._connect = connect
        self._actor = connect()
        self._is_current = deployment is None
        self._timeout_s = timeout_s
        self._deployment = deployment
        self._connection = None if node_id is None else CommitClient(self._commit_address, node_id)
        self._commits = CommitGroups(self._write, patience_s=GROUP_PATIENCE_S)

    def close(self) -> None:
        """Closes the connection over which turns are committed."""
        if self._connection is not None:
            self._connection.close()

    async def announce(self) -> None:
        """Makes the settings of the caller's deployment take effect, if it is the newest. Raises SettingsRefused."""
        if self._deployment is not None:
            await self._announce(self._deployment)

    link_secret = _called(ClusterController.link_secret)
    register_replica = _called(ClusterController.register_replica)
    heartbeat = _called(ClusterController.heartbeat)
    report_unreachable = _called(ClusterController.report_unreachable)
    drain_replica = _called(ClusterController.drain_replica)
    deregister_replica = _called(ClusterController.deregister_replica)
    open_session = _called(ClusterController.open_session)
    fork_session = _called(ClusterController.fork_session)
    copy_for_fork = _called(ClusterController.copy_for_fork)
    open_fork = _called(ClusterController.open_fork)
    resolve = _called(ClusterController.resolve)
    load_session = _called(ClusterController.load_session)
    notes = _called(ClusterController.notes)
    forget_note = _called(ClusterController.forget_note)
    offer_session = _called(ClusterController.offer_session)
    move_session = _called(ClusterController.move_session)
    close_session = _called(ClusterController.close_session)
    close_after = _called(ClusterController.close_after)
    expire_idle = _called(ClusterController.expire_idle)
    sessions = _called(ClusterController.sessions)
    session = _called(ClusterController.session)
    replicas = _called(ClusterController.replicas)
    measures = _called(ClusterController.measures)
    view = _called(ClusterController.view)
    _announce = _called(ClusterController.announce)
    _commit_address = _called(ClusterController.commit_address)
    _commit_turns = _called(ClusterController.commit_turns)

    async def commit_turn(self, record: TurnRecord) -> None:
        """Commits a turn. Turns that come while such a call is under way share the next one: a call costs the
        controller several times as much as a turn."""
        (refusal,) = await self._commits.commit([record])
        if refusal is not None:
            raise refusal

    async def _write(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        """Commits a group. What the connection does not say is held is asked of the actor, which tells why."""
        if self._connection is None:
            return await self._commit_turns(records)
        held = await self._connection.commit(records)
        open_ones = [record for record, is_held in zip(records, held, strict=True) if not is_held]
        outcomes = iter(await self._commit_turns(open_ones) if open_ones else ())
        return [None if is_held else next(outcomes) for is_held in held]

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last: list[RayActorError] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._until_up(method, args, kwargs, last)
        except TimeoutError:
            raise NoAnswer(
                f"the cluster controller did not answer {method} in {self._timeout_s} s",
                detail=_cause(last[-1]) if last else None,
            ) from None

    async def _until_up(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], last: list[RayActorError]
    ) -> Any:
        while True:
            try:
                actor = await self._current_actor()
                return await getattr(actor, method).remote(*args, **kwargs)
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
        """The controller's handle. Replaces a controller of an earlier version first."""
        while not self._is_current:
            actor = self._actor
            version = await version_of(actor)
            if actor is not self._actor:
                continue  # another call has connected again meanwhile
            self._is_current = version >= WIRE_VERSION
            if not self._is_current:
                logger.warning("the cluster controller is of an earlier version (%d); replacing it", version)
                ray.kill(actor, no_restart=True)
                self._connect_again()  # at once, before a replica of the earlier version starts its own again
        return self._actor

    def _connect_again(self) -> None:
        """Gets the handle again. The actor of that name may now be of any version."""
        self._actor = self._connect()
        self._is_current = self._deployment is None


def _cause(error: RayActorError) -> str:
    """The last line of Ray's message, which may be a whole traceback."""
    return str(error).rstrip().rpartition("\n")[2]
