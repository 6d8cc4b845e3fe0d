"""What the controller does with the policy: who gets an offered session, and what the log and the former owner
learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from manual_clock import ManualClock
from store_turns import commit_turn

from controllers.cluster import Cluster
from controllers.errors import SessionNotFound, StaleEpoch, StoreError
from controllers.records import HeartbeatReply, LedgerEntry, ReplicaStatus, SessionStatus, TurnRecord
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings, RebalancingSettings
from controllers.tokens import encode_tokens, unpack_tokens
from tests.unit.controllers.measured import measured
from tests.unit.controllers.reporting import HeldSessions

SILENCE_S = 9.0
SETTLED_S = 60


class World:
    """Replica "a" is crowded and owns session "s", which has two committed tokens and KV."""

    def __init__(self, path: Path, clock: ManualClock, rebalancing: RebalancingSettings | None) -> None:
        self.clock = clock
        self._held = HeldSessions()
        self.store = SqliteSessionStore(path, clock=clock)
        settings = ClusterSettings(replica_timeout_s=SILENCE_S, rebalancing=rebalancing)
        self.cluster = Cluster(settings, self.store, clock, clock)
        self.beat("a")
        self.cluster.open_session("s", "", None, None)
        commit_turn(self.cluster, TurnRecord("s", 1, 0, 0, encode_tokens([1, 2]), 1, "key", b"result"))

    def beat(
        self, replica_id: str, running: int = 0, waiting: int = 0, draining: bool = False
    ) -> HeartbeatReply:
        held = [
            SessionStatus(e.session_id, e.epoch, e.tokens, e.turns, 1.0, False, size_bytes=1)
            for e in self.held_by(replica_id)
        ]
        status = ReplicaStatus(replica_id, 1000, 1000, 0, running, waiting, draining)
        return self.report(status, *held)

    def report(self, status: ReplicaStatus, *held: SessionStatus) -> HeartbeatReply:
        """A heartbeat of a replica that holds exactly these sessions."""
        return self._held.beat(self.cluster, status, *held)

    def held_by(self, replica_id: str) -> list[LedgerEntry]:
        return [entry for entry in self.cluster.sessions() if entry.replica_id == replica_id]

    def crowd(self) -> HeartbeatReply:
        """Replica "a" has reported for long that it is busy, and "b" that it is not."""
        for _ in range(SETTLED_S):
            self.clock.advance(1.0)
            self.beat("a", running=2, waiting=6)
            self.beat("b", running=1)
        return self.beat("a", running=2, waiting=6)

    def owner(self) -> tuple[str, int]:
        (entry,) = self.cluster.sessions()
        return entry.replica_id, entry.epoch


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    world = World(tmp_path / "sessions.db", clock, RebalancingSettings())
    yield world
    world.store.disconnect()


def test_a_session_of_a_crowded_replica_moves_with_its_history(world: World) -> None:
    assert world.crowd().crowded
    assert world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("b", 2)
    assert world.cluster.resolve("s", False, "").replica_id == "b"
    record = world.cluster.load_session("s", 2, "b")
    assert unpack_tokens(record.history).tolist() == [1, 2]
    assert [result.idempotency_key for result in record.results] == ["key"]
    assert measured(world.cluster, "ownership_rebalanced") == 1
    assert measured(world.cluster, "ownership_transfers") == 1


def test_the_former_owner_is_refused_and_told_to_drop_it(world: World) -> None:
    world.crowd()
    assert world.cluster.offer_session("s", 1, "a")
    with pytest.raises(StaleEpoch):
        commit_turn(world.cluster, TurnRecord("s", 1, 1, 2, encode_tokens([3]), 1))
    with pytest.raises(StaleEpoch):
        world.cluster.load_session("s", 1, "a")
    still_held = SessionStatus("s", 1, 2, 1, 0.0, False)
    assert world.report(ReplicaStatus("a", 1000, 1000), still_held).stale_sessions == ("s",)


def test_a_repeated_offer_moves_nothing_twice(world: World) -> None:
    """The actor may die before its answer is out. The call is repeated then."""
    world.crowd()
    assert world.cluster.offer_session("s", 1, "a")
    with pytest.raises(StaleEpoch):
        world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("b", 2)


def test_only_the_owner_offers(world: World) -> None:
    world.crowd()
    for epoch, replica_id in ((1, "b"), (2, "a")):
        with pytest.raises(StaleEpoch):
            world.cluster.offer_session("s", epoch, replica_id)
    with pytest.raises(SessionNotFound):
        world.cluster.offer_session("unknown", 1, "a")
    assert world.owner() == ("a", 1)


def test_what_came_after_an_outage_does_not_count_as_a_load_that_lasted(world: World) -> None:
    """The time in which the controller stood still used to count as load of the replica that was busier right after
    it."""
    for _ in range(SETTLED_S):
        world.clock.advance(1.0)
        world.cluster.tick()
        world.beat("b", running=1)
        world.beat("a", running=1)
    world.clock.advance(30.0)
    world.cluster.tick()
    world.beat("b", running=1)
    world.beat("a", running=8)
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_a_session_stays_where_nobody_is_crowded(world: World) -> None:
    for _ in range(SETTLED_S):
        world.clock.advance(1.0)
        crowded = [world.beat("b", running=3).crowded, world.beat("a", running=4).crowded]
    assert crowded == [False, False]
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_nothing_goes_to_who_drains_or_is_late(world: World) -> None:
    world.crowd()
    world.cluster.drain_replica("b")
    assert not world.cluster.offer_session("s", 1, "a")
    world.beat("b")
    world.clock.advance(SILENCE_S / 3 + 0.1)
    assert not world.beat("a", running=8).crowded
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_a_log_that_fails_moves_nothing(world: World) -> None:
    world.crowd()
    world.store.disconnect()
    with pytest.raises(StoreError):
        world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)
    assert measured(world.cluster, "ownership_rebalanced") == 0


def test_it_can_be_turned_off(tmp_path: Path, clock: ManualClock) -> None:
    world = World(tmp_path / "off.db", clock, None)
    assert not world.crowd().crowded
    assert not world.cluster.offer_session("s", 1, "a")
    world.store.disconnect()
