"""The cluster controller as a detached, named Ray actor. The only file of this package that imports Ray.

Nothing is lost when the actor dies: a restarted actor rebuilds the ledger from the session log, and replicas register
again with their next heartbeat. Methods run one at a time on the actor's event loop. They do not await, so each is
atomic. Only the methods that commit turns wait: their turns are fenced and written in one step with the next group. A
method may run twice if the actor dies just before it answers. `open_key`, `fork_key`, the turn index and the epoch make
the repetition harmless.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from controllers.attended_clock import TICK_S
from controllers.cluster import Cluster
from controllers.commit_groups import Write
from controllers.deployments import Deployments
from controllers.errors import ControllerError
from controllers.histogram import Measure
from controllers.open_store import open_store
from controllers.records import (
    Assignment,
    ClusterView,
    ForkedHistory,
    ForkOrder,
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionReport,
    SocketAddress,
    TurnNote,
    TurnRecord,
)
from controllers.session_log.store import SessionStore
from controllers.settings import ClusterSettings, Deployment, LogSettings
from controllers.wire_record import FIRST_VERSION, WIRE_VERSION


class CommitServer(Protocol):
    """Takes turns over connections without Ray. Used on the actor's event loop."""

    def admit(self, key: bytes) -> SocketAddress:
        """Where a process with this public key may connect."""


ServeCommits = Callable[[Write], CommitServer]

_HEAD_NODE = "node:__internal_head__"
_HEAD_NODE_SHARE = 0.001
LINK_SECRET_BYTES = 32


class ClusterController:
    """The actor's methods. `controllers.cluster.Cluster` says what each does and which ControllerError it raises.

    `settings` apply until a deployment is announced. From then on those of the newest deployment apply, also after the
    actor has restarted. `cluster` names the cluster to others on the same session log. `serve_commits` makes the server
    of commit_turns for connections without Ray (None: there is none). `clock` returns Unix time and `timer` monotonic
    time, in seconds.

    The link secret is in the log, since an actor that is created anew must give out the same one: processes that have
    it ask only once.

    Construction raises StoreError if the session log cannot be used.
    """

    version = WIRE_VERSION
    """The wire version of the code that the actor was created with, which it runs for as long as it lives."""

    def __init__(
        self,
        settings: ClusterSettings,
        log: LogSettings,
        cluster: str,
        serve_commits: ServeCommits | None = None,
        *,
        open_log: Callable[[LogSettings, str, Callable[[], float]], SessionStore] = open_store,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        store = open_log(log, cluster, clock)
        self._link_secret = store.link_secret(secrets.token_bytes(LINK_SECRET_BYTES))
        self._deployments = Deployments(store, log, settings)
        self._cluster = Cluster(self._deployments.settings, store, clock=clock, timer=timer)
        self._cluster.tick()
        self._commits = self._cluster.commits.in_groups()
        self._commit_server = None if serve_commits is None else serve_commits(self._commits.commit)
        self._ticks: asyncio.Task[None] | None = None
        count = self._cluster.count()
        logging.getLogger(__name__).info("session log %s: %d sessions", log, count)

    async def announce(self, deployment: Deployment) -> None:
        """Makes the settings of a new deployment take effect, see Deployments.announce. Raises SettingsRefused."""
        if self._deployments.announce(deployment):
            self._cluster.configure(deployment.settings)

    async def link_secret(self) -> bytes:
        """The secret that the cluster's processes share. It is for nobody else."""
        return self._link_secret

    async def register_replica(self, status: ReplicaStatus) -> None:
        self._attend()
        self._cluster.register_replica(status)

    async def heartbeat(self, status: ReplicaStatus, report: SessionReport) -> HeartbeatReply:
        self._attend()
        return self._cluster.heartbeat(status, report)

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        return self._cluster.report_unreachable(replica_id, died)

    async def drain_replica(self, replica_id: str) -> None:
        self._cluster.drain_replica(replica_id)

    async def deregister_replica(self, replica_id: str) -> int:
        return self._cluster.deregister_replica(replica_id)

    async def open_session(
        self,
        session_id: str,
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

    async def copy_for_fork(
        self, parent_id: str, epoch: int, replica_id: str, length: int | None = None
    ) -> ForkedHistory:
        return self._cluster.copy_for_fork(parent_id, epoch, replica_id, length)

    async def open_fork(self, copy: ForkedHistory, order: ForkOrder) -> SessionRecord:
        return self._cluster.open_fork(copy, order)

    async def resolve(
        self,
        session_id: str,
        create: bool = False,
        tenant: str = "",
        preferred: str | None = None,
        timeout_s: float | None = None,
    ) -> Assignment:
        return self._cluster.resolve(session_id, create, tenant, preferred, timeout_s)

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

    async def commit_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        """Each turn's outcome, see Commits.commit."""
        return await self._commits.commit(records)

    async def commit_address(self, key: bytes) -> SocketAddress | None:
        """Where a process with this public key may connect to commit turns without Ray. None: nowhere."""
        return None if self._commit_server is None else self._commit_server.admit(key)

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
        return self._cluster.sessions(tenant, after, limit)

    async def session(self, session_id: str) -> LedgerEntry:
        return self._cluster.session(session_id)

    async def replicas(self, all_heard: bool = False) -> list[ReplicaStatus]:
        return self._cluster.replicas(all_heard)

    async def measures(self) -> list[Measure]:
        return self._cluster.measures(self._commits.num_waiting)

    async def view(self, after: str | None = None, limit: int = 100) -> ClusterView:
        return self._cluster.watch.view(after, limit)

    def _attend(self) -> None:
        """Starts the ticks at the first call of a replica. They run on the loop that runs the calls, so they are late
        when calls cannot run. Until then the attended time stands still: no replica can be silent that could not yet be
        heard."""
        if self._ticks is None:
            self._ticks = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._cluster.tick()


def get_or_create_controller(
    name: str,
    namespace: str,
    settings: ClusterSettings,
    log: LogSettings,
    serve_commits: ServeCommits | None = None,
) -> ActorHandle:
    """The cluster controller's handle. Creates the actor if there is none, and does not wait for it to be up.

    A running controller keeps its settings until a new deployment is announced to it. The actor lives on the head node,
    where a log in a file also is. If the log cannot be used, calls on the handle raise Ray's ActorDiedError with the
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
        scheduling_strategy="DEFAULT",  # else it joins the placement group of the replica that creates it
        enable_task_events=False,  # else Ray's GCS keeps some 3 KB of each call, up to 100,000 calls
    )
    with class_kept_whole():
        # Ray keeps its session's name as long as a cluster lives, even if the head node restarts from Ray's own state
        # in Redis. No two clusters have the same name.
        cluster = ray.get_runtime_context().get_session_name()
        return actor_class.remote(settings, log, cluster, serve_commits)


@contextmanager
def class_kept_whole() -> Iterator[None]:
    """Within this context the actor's class is pickled with the code of its methods, not as a reference to this module.

    Ray builds every caller's handle from the pickled class of the actor. The class must load in processes of the
    version before and the version after, where this module has other methods. Names that its code uses from other
    modules must exist in those versions, too.
    """
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


async def version_of(controller: ActorHandle) -> int:
    """The wire version of the code that the actor runs. It is read in the actor's process: a handle to an actor of
    version 1 may show the methods of the caller's class, or methods that take no positional arguments.

    Raises Ray's RayActorError if the actor cannot be reached.
    """
    answer = controller.__ray_call__.remote(fn=lambda actor: getattr(actor, "version", FIRST_VERSION))
    return cast(int, await answer)
