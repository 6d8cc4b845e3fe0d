"""Calls to the cluster controller, which may be several actors (controllers/shards.py). Typed errors are unwrapped.

What is about a session goes to the shard of its key. What is about replicas goes to all shards, since each judges them
for itself. Answers of all shards are joined to one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from controllers.cluster_actor import get_or_create_controller
from controllers.errors import ControllerError, NoAnswer, SettingsRefused, StoreError
from controllers.histogram import Measure
from controllers.joined_answers import (
    cursors_of,
    joined_measures,
    joined_page,
    joined_replicas,
    joined_view,
)
from controllers.records import (
    Assignment,
    ClusterView,
    ForkOrder,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    TurnNote,
    TurnRecord,
)
from controllers.session_keys import session_key, tenant_in
from controllers.settings import Deployment
from controllers.shards import deployment_of_shard, shard_name, shard_of
from serving.settings.strict_settings import SettingsError
from serving.wire.commit_server import serve_commits
from serving.wire.shard_calls import ShardCalls

logger = logging.getLogger(__name__)

CONTROLLER_TIMEOUT_S = 15.0
START_TIMEOUT_S = 900.0
"""How long a process that starts waits for the controller and its log."""
START_PAUSE_S = 1.0
NAMESPACE = "kedge"
DECIDES_S = 1.0
"""How long a shard may take to decide something for all. Then the next one is asked."""
STRAGGLER_S = 0.5
"""How long the others of a question to all shards are waited for once the first has answered, if one answer will do."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """What shards have told, joined. `missing` are the numbers of those that did not answer."""

    joined: T
    missing: tuple[int, ...] = ()


class ControllerCalls:
    """Calls to all shards. `controllers.cluster.Cluster` says what each call does and raises; NoAnswer if a shard that
    is asked does not answer."""

    def __init__(self, shards: Sequence[ShardCalls]) -> None:
        self.shards = tuple(shards)

    def shard_of(self, key: str) -> int:
        """The number of the shard that has the session of this key."""
        return shard_of(key, len(self.shards))

    def close(self) -> None:
        """Closes the connections over which turns are committed. To be called once nothing is committed any more."""
        for shard in self.shards:
            shard.close()

    async def announce(self) -> None:
        """Makes the settings of the caller's deployment take effect, if it is the newest. Raises SettingsRefused."""
        await self._all(lambda shard: shard.announce())

    async def link_secret(self) -> bytes:
        """The secret that the cluster's processes share: the first shard's."""
        return await self.shards[0].link_secret()

    async def register_replica(self, status: ReplicaStatus) -> None:
        await self._all(lambda shard: shard.register_replica(status))

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        """True if the replica counts as gone at a shard that answers soon. All shards are told."""
        return any(await self._soon(lambda shard: shard.report_unreachable(replica_id, died)))

    async def drain_replica(self, replica_id: str) -> None:
        """The first shard that answers soon decides; the last one may take its time. If it refuses, nothing changes. If
        it does not, the replica drains, and its heartbeats tell the others, whatever these answer now."""
        decided = await self._decided(lambda shard: shard.drain_replica(replica_id))
        others = [shard for shard in self.shards if shard is not decided]
        told = {asyncio.create_task(shard.drain_replica(replica_id)) for shard in others}
        if not told:
            return
        try:
            await asyncio.wait(told, timeout=STRAGGLER_S)
        finally:
            for each in told:
                each.cancel()  # of those that are done this changes nothing
        for each in told:
            failure = each.exception() if each.done() else "no answer"
            if failure is not None:
                logger.warning("replica %s drains; a shard was not told yet: %s", replica_id, failure)

    async def open_session(
        self,
        session_id: str,
        tenant: str = "",
        timeout_s: float | None = None,
        capacity_tokens: int | None = None,
        open_key: str | None = None,
    ) -> Assignment:
        key = session_key(tenant, session_id)
        return await self._of(key).open_session(key, tenant, timeout_s, capacity_tokens, open_key)

    async def fork_session(
        self, parent_id: str, epoch: int, replica_id: str, order: ForkOrder
    ) -> SessionRecord:
        """A child whose key belongs to another shard begins with a copy of the history, since each shard has a log of
        its own."""
        parent = self._of(parent_id)
        child = self._of(session_key(tenant_in(parent_id), order.child_id))
        if child is parent:
            return await parent.fork_session(parent_id, epoch, replica_id, order)
        copy = await parent.copy_for_fork(parent_id, epoch, replica_id, order.length)
        return await child.open_fork(copy, order)

    async def resolve(
        self,
        session_id: str,
        create: bool = False,
        tenant: str = "",
        preferred: str | None = None,
        timeout_s: float | None = None,
    ) -> Assignment:
        key = session_key(tenant, session_id)
        return await self._of(key).resolve(key, create, tenant, preferred, timeout_s)

    async def load_session(self, session_id: str, epoch: int, replica_id: str) -> SessionRecord:
        return await self._of(session_id).load_session(session_id, epoch, replica_id)

    async def notes(self, session_id: str, tenant: str, after: int | None = None) -> list[TurnNote]:
        return await self._of(session_key(tenant, session_id)).notes(session_id, tenant, after)

    async def forget_note(self, session_id: str, tenant: str, turn_index: int) -> None:
        await self._of(session_key(tenant, session_id)).forget_note(session_id, tenant, turn_index)

    async def offer_session(self, session_id: str, epoch: int, replica_id: str) -> bool:
        return await self._of(session_id).offer_session(session_id, epoch, replica_id)

    async def move_session(
        self, session_id: str, epoch: int, replica_id: str, to: str | None = None
    ) -> Assignment:
        return await self._of(session_id).move_session(session_id, epoch, replica_id, to)

    async def commit_turn(self, record: TurnRecord) -> None:
        await self._of(record.session_id).commit_turn(record)

    async def close_session(
        self,
        session_id: str,
        tenant: str | None = None,
        epoch: int | None = None,
        open_key: str | None = None,
    ) -> bool:
        key = session_id if tenant is None else session_key(tenant, session_id)
        return await self._of(key).close_session(session_id, tenant, epoch, open_key)

    async def close_after(self, session_id: str, epoch: int, turn_key: str) -> None:
        await self._of(session_id).close_after(session_id, epoch, turn_key)

    async def expire_idle(self) -> list[str]:
        return [name for ended in await self._all(lambda shard: shard.expire_idle()) for name in ended]

    async def sessions(
        self, tenant: str | None = None, after: str | None = None, limit: int | None = None
    ) -> list[LedgerEntry]:
        return joined_page(await self._all(lambda shard: shard.sessions(tenant, after, limit)), limit)

    async def session(self, session_id: str) -> LedgerEntry:
        return await self._of(session_id).session(session_id)

    async def replicas(self, all_heard: bool = False) -> list[ReplicaStatus]:
        """The replicas that any shard knows that answers soon: all hear of the same ones."""
        return joined_replicas(await self._soon(lambda shard: shard.replicas(all_heard)))

    async def figures(self, patience_s: float) -> Told[list[Measure]]:
        """The measures of the shards that answer within `patience_s`."""
        told, missing = await self._within(patience_s, lambda shard: shard.measures())
        return Told(joined_measures([each or () for each in told]), missing)

    async def look(self, after: str | None, limit: int, patience_s: float) -> Told[ClusterView]:
        """The view of the shards that answer within `patience_s`. What happens at the others is told once they answer
        again."""
        cursors = dict(zip(self.shards, cursors_of(after, len(self.shards)), strict=True))
        told, missing = await self._within(patience_s, lambda shard: shard.view(cursors[shard], limit))
        views = [
            view or ClusterView(0, cursor=cursor or "")
            for view, cursor in zip(told, cursors.values(), strict=True)
        ]
        return Told(joined_view(views, limit), missing)

    def _of(self, key: str) -> ShardCalls:
        return self.shards[self.shard_of(key)]

    async def _decided(self, ask: Callable[[ShardCalls], Coroutine[Any, Any, None]]) -> ShardCalls:
        """Asks one shard after the other, until one answers; returns that one. Raises its error."""
        *others, last = self.shards
        for shard in others:
            with suppress(NoAnswer, TimeoutError):
                async with asyncio.timeout(DECIDES_S):
                    await ask(shard)
                return shard
        await ask(last)
        return last

    async def _soon(self, ask: Callable[[ShardCalls], Coroutine[Any, Any, T]]) -> list[T]:
        """All shards are asked. Once one has answered, the others are waited for no longer than STRAGGLER_S. Raises an
        error only if none answers."""
        asked = [asyncio.create_task(ask(shard)) for shard in self.shards]
        try:
            for answer in asyncio.as_completed(asked):
                with suppress(ControllerError):
                    await answer
                    await asyncio.wait(asked, timeout=STRAGGLER_S)
                    break
        finally:
            for each in asked:
                each.cancel()
        told = [each for each in asked if each.done() and not each.cancelled() and each.exception() is None]
        return [each.result() for each in told or asked[:1]]

    async def _within(
        self, patience_s: float, ask: Callable[[ShardCalls], Coroutine[Any, Any, T]]
    ) -> tuple[list[T | None], tuple[int, ...]]:
        """The answers of all shards, and the numbers of those that do not answer within `patience_s`, which have None.
        Raises an error if none answers."""
        asked = [asyncio.create_task(_or_error(ask(shard))) for shard in self.shards]
        try:
            await asyncio.wait(asked, timeout=patience_s)
        finally:
            for each in asked:
                each.cancel()  # of those that are done this changes nothing
        silent = NoAnswer(f"the cluster controller did not answer in {patience_s} s")
        told = [each.result() if each.done() else silent for each in asked]
        missing = tuple(shard for shard, each in enumerate(told) if isinstance(each, ControllerError))
        if len(missing) == len(told):
            _raise_first(told)
        for shard in missing:
            logger.warning("shard %d of the cluster controller is left out: %s", shard, told[shard])
        return [None if isinstance(each, ControllerError) else each for each in told], missing

    async def _all(self, ask: Callable[[ShardCalls], Awaitable[T]]) -> list[T]:
        """The answers of all shards. Raises the first error once all have answered."""
        answers = await asyncio.gather(*map(ask, self.shards), return_exceptions=True)
        _raise_first(answers)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


async def once_up(ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` returns, once the controller and its log can be used. So a process that starts waits for them, and
    keeps what it has loaded. Raises TimeoutError after START_TIMEOUT_S, and any other refusal at once."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                return await ask()
            except StoreError as error:  # NoAnswer is one
                logger.warning("still waiting for the cluster controller: %s", error)
                await asyncio.sleep(START_PAUSE_S)


async def _or_error(asked: Awaitable[T]) -> T | ControllerError:
    try:
        return await asked
    except ControllerError as error:
        return error


def _raise_first(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


def connect_controller(name: str, deployment: Deployment) -> ControllerCalls:
    """Calls to the cluster controller of this name. Creates its shards if there are none."""
    return ControllerCalls([_connect_shard(name, deployment, at) for at in range(deployment.log.shards)])


def _connect_shard(name: str, deployment: Deployment, shard: int) -> ShardCalls:
    own, its_name = deployment_of_shard(deployment, shard), shard_name(name, shard)
    return ShardCalls(
        lambda: get_or_create_controller(its_name, NAMESPACE, own.settings, own.log, serve_commits),
        timeout_s=CONTROLLER_TIMEOUT_S,
        deployment=own,
        node_id=ray.get_runtime_context().get_node_id(),
    )


def announce_at_deploy(name: str, deployment: Deployment) -> None:
    """Announces the deployment to a running controller before any process of the deployment starts.

    So deployments take effect in the order in which they were made, and a deployment that the controller refuses leaves
    the application as it is. A controller of an earlier version is also told. The call uses a keyword because a handle
    to version 1 may take no positional arguments. That controller is replaced when the deployment's processes start.

    Without a Ray cluster, or if the controller does not answer, the replicas announce the deployment when they start.
    Raises SettingsError.
    """
    if not ray.is_initialized():
        return
    for shard in range(deployment.log.shards):
        _announce(shard_name(name, shard), deployment_of_shard(deployment, shard))


def _announce(name: str, deployment: Deployment) -> None:
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
