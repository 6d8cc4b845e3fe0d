"""A cluster with its log and clock, for tests of the controller's logic."""

from __future__ import annotations

from manual_clock import ManualClock
from session_logs import opened_log
from store_turns import commit_turn, turn_of

from controllers.cluster import Cluster
from controllers.records import Assignment, HeartbeatReply, ReplicaStatus, SessionStatus
from controllers.session_log.log_cipher import LogCipher
from controllers.settings import ClusterSettings, LogSettings
from tests.unit.controllers.reporting import HeldSessions

SILENCE_S = 10.0
IDLE_S = 100.0
SETTINGS = ClusterSettings(
    replica_timeout_s=SILENCE_S, session_timeout_s=IDLE_S, max_sessions=20, placement_tokens=10
)


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

    def __init__(self, log: LogSettings, clock: ManualClock, settings: ClusterSettings = SETTINGS) -> None:
        self.clock = clock
        self.wall = WallClock(clock)
        self._log = log
        self._settings = settings
        self._held = HeldSessions()
        self._start(None)

    def restart(self, cipher: LogCipher | None = None) -> Cluster:
        self.store.disconnect()
        self._start(cipher)
        return self.cluster

    def beat(self, *replica_ids: str, **status: object) -> None:
        """Heartbeats of these replicas, which hold no sessions."""
        for replica_id in replica_ids:
            self.report(replica_id, **status)

    def report(self, replica_id: str, *held: SessionStatus, **status: object) -> HeartbeatReply:
        """A heartbeat of a replica that holds exactly these sessions."""
        fields = {"free_tokens": 1000, "total_tokens": 1000} | status
        return self._held.beat(self.cluster, ReplicaStatus(replica_id, **fields), *held)

    def owner(self) -> tuple[str, int]:
        """Owner and epoch of the only session."""
        (entry,) = self.cluster.sessions()
        return entry.replica_id, entry.epoch

    def _start(self, cipher: LogCipher | None) -> None:
        self.store = opened_log(self._log, self.wall, cipher)
        self.cluster = Cluster(self._settings, self.store, self.wall, self.clock)


def open_session(world: World, session_id: str = "s", tenant: str = "") -> Assignment:
    return world.cluster.open_session(session_id, tenant, None, None)


def open_at_a(world: World) -> None:
    """Opens session "s" at replica "a", and commits two tokens of it."""
    assert open_session(world).replica_id == "a"
    commit_turn(world.cluster, turn_of(0, 0, [1, 2], idempotency_key="key", result=b"result"))
