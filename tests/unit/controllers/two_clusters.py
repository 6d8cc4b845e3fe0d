"""Two clusters on one Redis, as during an upgrade: the real Cluster objects and stores, and one clock."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from manual_clock import ManualClock
from redis_server import RedisServer
from store_turns import commit_turn

from controllers.cluster import Cluster
from controllers.errors import StaleEpoch
from controllers.records import (
    Assignment,
    HeartbeatReply,
    ReplicaStatus,
    SessionRecord,
    SessionStatus,
    TurnRecord,
)
from controllers.session_log.redis_store import RedisSessionStore
from controllers.settings import ClusterSettings
from controllers.tokens import encode_tokens
from tests.unit.controllers.reporting import HeldSessions

SILENCE_S = 10.0
IDLE_S = 1000.0


class Side:
    """A cluster of two replicas. `restart` has the effect of a crash of its controller's process."""

    def __init__(self, name: str, server: RedisServer, log_name: str, clock: ManualClock) -> None:
        self.name = name
        self.replicas = (f"{name}-1", f"{name}-2")
        self._server = server
        self._log_name = log_name
        self._clock = clock
        self._held = HeldSessions()
        self._build()

    def restart(self) -> None:
        former = self.store
        self._build()
        former.disconnect()

    def beat(self) -> None:
        for replica_id in self.replicas:
            self.report(replica_id)

    def report(self, replica_id: str, *held: SessionStatus) -> HeartbeatReply:
        """A heartbeat of a replica that holds exactly these sessions."""
        return self._held.beat(self.cluster, ReplicaStatus(replica_id, 1000, 1000), *held)

    def begin(self, session_id: str) -> tuple[Assignment, SessionRecord]:
        """Does what the beginning of a turn does: finds the owner, which then loads the history. As an ingress does, it
        asks for the owner once more if the first one turns out to be stale."""
        for asked_anew in (False, True):
            owner = self.cluster.resolve(session_id, False, "")
            assert owner.replica_id in self.replicas
            try:
                return owner, self.cluster.load_session(session_id, owner.epoch, owner.replica_id)
            except StaleEpoch:
                if asked_anew:
                    raise
        raise AssertionError

    def turn(self, session_id: str, tokens: list[int]) -> TurnRecord:
        owner, held = self.begin(session_id)
        record = next_turn(owner, held, tokens)
        commit_turn(self.cluster, record)
        return record

    def session_ids(self) -> list[str]:
        return sorted(entry.session_id for entry in self.cluster.sessions())

    def _build(self) -> None:
        self.store = RedisSessionStore(self._server.log(self._log_name), self.name, clock=self._clock)
        settings = ClusterSettings(replica_timeout_s=SILENCE_S, session_timeout_s=IDLE_S, placement_tokens=10)
        self.cluster = Cluster(settings, self.store, self._clock, self._clock)
        self.beat()


class Upgrade:
    """The serving cluster, and one that is started beside it."""

    def __init__(self, server: RedisServer, clock: ManualClock) -> None:
        self.server = server
        self.clock = clock
        self.log_name = uuid.uuid4().hex
        self.old = Side("old", server, self.log_name, clock)
        self._new: Side | None = None

    @property
    def new(self) -> Side:
        """The new cluster, which starts at the first use."""
        if self._new is None:
            self._new = Side("new", self.server, self.log_name, self.clock)
        return self._new

    def gone(self, name: str) -> None:
        """Makes it look as if the cluster had not swept for a minute."""
        with self.server.client() as client:
            assert client.delete(f"kedge:{{{self.log_name}}}:alive:{name}") == 1

    @contextmanager
    def lost(self, session_id: str) -> Iterator[None]:
        """A failover of Redis loses what was changed of the session within this context."""
        key = f"kedge:{{{self.log_name}}}:session:{session_id}"
        with self.server.client() as client:
            kept = client.get(key)
            yield
            client.set(key, kept)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.old.beat()
        self.new.beat()

    def stop(self) -> None:
        self.old.store.disconnect()
        self.new.store.disconnect()


def open_session(side: Side, session_id: str = "s") -> None:
    side.cluster.open_session(session_id, "", None, None)


def next_turn(owner: Assignment, held: SessionRecord, tokens: list[int]) -> TurnRecord:
    return TurnRecord(
        owner.session_id, owner.epoch, held.turns, held.num_tokens, encode_tokens(tokens), len(tokens)
    )
