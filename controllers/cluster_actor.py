"""The cluster controller as a detached, named Ray actor. The only file of this package that imports Ray.

The actor dies with nothing lost: a restarted one rebuilds the ledger from the session log, and replicas make
themselves known again with their next heartbeat. Methods run one at a time on the actor's event loop. None awaits, but
those that commit turns: these wait for the next group of turns, which is fenced and written in one step. So each is
atomic, a commit at the moment at which its group is written. A method may run twice if the actor dies just before it
answers; `open_key`, `fork_key`, the turn index and the epoch make the repetition harmless.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from controllers.attended_clock import TICK_S
from controllers.cluster import Cluster
from controllers.deployments import Deployments
from controllers.errors import ControllerError
from controllers.histogram import Measure
from controllers.open_store import open_store
from controllers.records import (
    Assignment,
    ClusterView,
    ForkOrder,
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionReport,
    SessionStatus,
    TurnNote,
    TurnRecord,
)
from controllers.settings import ClusterSettings, Deployment, LogSettings
from controllers.store import SessionStore
from controllers.wire_record import FIRST_VERSION, WIRE_VERSION

_HEAD_NODE = "node:__internal_head__"
_HEAD_NODE_SHARE = 0.001
LINK_SECRET_BYTES = 32


class ClusterController:
    """Actor methods; `controllers.cluster.Cluster` says what each does and which ControllerError it raises.

    `settings` count until a deployment is announced, and after that those of the newest one, also once the actor has
    been started again. `cluster` names the cluster to others on the same session log. `link_secret` is what the
    processes of the cluster share; Ray keeps it for an actor that is started again. `clock` returns Unix time, `timer`
    monotonic time, in seconds. Construction raises StoreError if the session log cannot be used.
    """

    version = WIRE_VERSION
    """That of the code that the actor was made with, which it runs for as long as it lives."""

    def __init__(
        self,
        settings: ClusterSettings,
        log: LogSettings,
        cluster: str,
        link_secret: bytes = b"",
        *,
        open_log: Callable[[LogSettings, str, Callable[[], float]], SessionStore] = open_store,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link_secret = link_secret
        store = open_log(log, cluster, clock)
        self._deployments = Deployments(store, log, settings)
        self._cluster = Cluster(self._deployments.settings, store, clock=clock, timer=timer)
        self._cluster.tick()
        self._commits = self._cluster.commits.in_groups()
        self._ticks: asyncio.Task[None] | None = None
        count = self._cluster.count()
        logging.getLogger(__name__).info("session log %s: %d sessions", log, count)

    async def announce(self, deployment: Deployment) -> None:
        """The settings of a new deployment take effect, see Deployments.announce. Raises SettingsRefused."""
        if self._deployments.announce(deployment):
            self._cluster.configure(deployment.settings)

    async def link_secret(self) -> bytes:
        """For the processes of the cluster, and nobody else."""
        return self._link_secret

    async def register_replica(self, status: ReplicaStatus) -> None:
        self._attend()
        self._cluster.register_replica(status)

    async def heartbeat(
        self, status: ReplicaStatus, report: SessionReport | Sequence[SessionStatus] = ()
    ) -> HeartbeatReply:
        self._attend()
        return self._cluster.heartbeat(status, report)

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        return self._cluster.report_unreachable(replica_id, died)

    async def report_lost(self, replica_id: str) -> int:
        """What front ends of wire version 1 call instead: to them a replica that they could not reach has died."""
        return int(self._cluster.report_unreachable(replica_id, True))

    async def drain_replica(self, replica_id: str) -> None:
        self._cluster.drain_replica(replica_id)

    async def deregister_replica(self, replica_id: str) -> int:
        return self._cluster.deregister_replica(replica_id)

    async def open_session(
        self,
        session_id: str | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
        capacity_tokens: int | None = None,
        open_key: str | None = None,
    ) -> Assignment:
        return self._cluster.open_session(session_id, tenant, timeout_s, capacity_tokens, open_key)

    async def fork_session(
        self, parent_id: str, epoch: int, replica_id: str, order: ForkOrder
    ) -> SessionRecord:
        return self._cluster.fork_session(parent_id, epoch, replica_id, order)

    async def resolve(
        self, session_id: str, create: bool = False, tenant: str = "", preferred: str | None = None
    ) -> Assignment:
        return self._cluster.resolve(session_id, create, tenant, preferred)

    async def load_session(self, session_id: str, epoch: int, replica_id: str) -> SessionRecord:
        return self._cluster.load_session(session_id, epoch, replica_id)

    async def notes(self, session_id: str, tenant: str, after: int | None = None) -> list[TurnNote]:
        return self._cluster.notes.page(session_id, tenant, after)

    async def forget_note(self, session_id: str, tenant: str, turn_index: int) -> None:
        self._cluster.notes.forget(session_id, tenant, turn_index)

    async def offer_session(self, session_id: str, epoch: int, replica_id: str) -> bool:
        return self._cluster.offer_session(session_id, epoch, replica_id)

    async def move_session(
        self, session_id: str, epoch: int, replica_id: str, to: str | None = None
    ) -> Assignment:
        return self._cluster.move_session(session_id, epoch, replica_id, to)

    async def commit_turn(self, record: TurnRecord) -> None:
        """What replicas before wire version 3 call instead of `commit_turns`."""
        (refusal,) = await self._commits.commit([record])
        if refusal is not None:
            raise refusal

    async def commit_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        """Each turn's outcome, see Commits.commit."""
        return await self._commits.commit(records)

    async def close_session(
        self,
        session_id: str,
        tenant: str | None = None,
        epoch: int | None = None,
        open_key: str | None = None,
    ) -> bool:
        return self._cluster.close_session(session_id, tenant, epoch, open_key)

    async def close_after(self, session_id: str, epoch: int, turn_key: str) -> None:
        self._cluster.close_after(session_id, epoch, turn_key)

    async def expire_idle(self) -> list[str]:
        return self._cluster.expire_idle()

    async def sessions(
        self, tenant: str | None = None, after: str | None = None, limit: int | None = None
    ) -> list[LedgerEntry]:
        """Front ends before wire version 3 ask for all of them."""
        return self._cluster.sessions(tenant, after, limit)

    async def session(self, session_id: str) -> LedgerEntry:
        return self._cluster.session(session_id)

    async def replicas(self) -> list[ReplicaStatus]:
        return self._cluster.replicas()

    async def stats(self) -> dict[str, float]:
        return self._cluster.stats()

    async def measures(self) -> list[Measure]:
        return self._cluster.measures(self._commits.num_waiting)

    async def view(self, after: str | None = None, limit: int = 100) -> ClusterView:
        return self._cluster.watch.view(after, limit)

    def _attend(self) -> None:
        """From a replica's first call on, ticks come from the loop of the calls: they are late when calls cannot run.
        Until then time stands still: nobody is silent who could not be heard."""
        if self._ticks is None:
            self._ticks = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._cluster.tick()


def get_or_create_controller(
    name: str, namespace: str, settings: ClusterSettings, log: LogSettings
) -> ActorHandle:
    """The cluster controller's handle; creates the actor if there is none. Does not wait for it to be up.

    A running controller keeps its settings until a new deployment is announced to it. The actor lives on the head node,
    beside a log in a file. If the log cannot be used, calls on the handle raise Ray's ActorDiedError with the
    StoreError's text.
    """
    actor_class = ray.remote(ClusterController).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        resources={_HEAD_NODE: _HEAD_NODE_SHARE},
        scheduling_strategy="DEFAULT",  # else it would join the placement group of the replica that creates it
    )
    with class_kept_whole():
        # Ray keeps its session's name for as long as a cluster lives, also through a restart of the head node from
        # Ray's own state in Redis. No two clusters have the same one.
        cluster = ray.get_runtime_context().get_session_name()
        return actor_class.remote(settings, log, cluster, secrets.token_bytes(LINK_SECRET_BYTES))


@contextmanager
def class_kept_whole() -> Iterator[None]:
    """In here the actor's class is pickled with the code of its methods, not as references to this module.

    Ray builds every caller's handle from the class that it keeps of the actor. That class must load in processes of the
    versions before and after, whose module of this name has other methods. What its code names of other modules must be
    in those versions, too.
    """
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


async def version_of(controller: ActorHandle) -> int:
    """The wire version of the code that the actor runs, asked in its own process: a handle to an actor of version 1
    may show the methods of the caller's class, or methods that take no positional arguments.

    Raises Ray's RayActorError if the actor cannot be reached.
    """
    answer = controller.__ray_call__.remote(fn=lambda actor: getattr(actor, "version", FIRST_VERSION))
    return cast(int, await answer)
