"""A cluster with its log and clock, for tests of the controller's logic."""

from __future__ import annotations

from pathlib import Path

from manual_clock import ManualClock

from controllers.cluster import Cluster
from controllers.records import Assignment, HeartbeatReply, ReplicaStatus, SessionStatus
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from tests.unit.controllers.reporting import HeldSessions

SILENCE_S = 10.0
IDLE_S = 100.0


class WallClock:
    """Unix time that a test can set forward or back."""

    def __init__(self, timer: ManualClock) -> None:
        self._timer = timer
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return self._timer() + self._ahead_s

    def advance(self, by_s: float) -> None:
        self._ahead_s += by_s


class World:
    """A cluster, its log and its clock. `restart` has the effect of a crash of the controller's process."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.clock = clock
        self.wall = WallClock(clock)
        self._path = path
        self._held = HeldSessions()
        self.store = SqliteSessionStore(path, clock=self.wall)
        self.cluster = self._build()

    def restart(self, cipher: LogCipher | None = None) -> Cluster:
        self.store.disconnect()
        self.store = SqliteSessionStore(self._path, clock=self.wall, cipher=cipher)
        self.cluster = self._build()
        return self.cluster

    def _build(self) -> Cluster:
        settings = ClusterSettings(
            replica_timeout_s=SILENCE_S,
            session_timeout_s=IDLE_S,
            max_sessions=20,
            placement_tokens=10,
        )
        return Cluster(settings, self.store, self.wall, self.clock)

    def beat(self, *replica_ids: str, free_tokens: int = 1000, draining: bool = False) -> None:
        """Heartbeats of these replicas, which hold no sessions."""
        for replica_id in replica_ids:
            self._held.beat(self.cluster, ReplicaStatus(replica_id, free_tokens, 1000, draining=draining))

    def report(self, replica_id: str, *held: SessionStatus, free_tokens: int = 1000) -> HeartbeatReply:
        """A heartbeat of a replica that holds exactly these sessions."""
        return self._held.beat(self.cluster, ReplicaStatus(replica_id, free_tokens, 1000), *held)


def open_session(world: World, session_id: str = "s", tenant: str = "") -> Assignment:
    return world.cluster.open_session(session_id, tenant, None, None)
