"""What the controller does with the policy: who gets an offered session, and what the log and the former owner
learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_world import SETTINGS, SILENCE_S, World, open_at_a
from manual_clock import ManualClock
from store_turns import commit_turn

from controllers.errors import SessionNotFound, StaleEpoch, StoreError
from controllers.records import HeartbeatReply, SessionStatus, TurnRecord
from controllers.settings import LogSettings
from controllers.tokens import encode_tokens, unpack_tokens
from tests.unit.controllers.measured import measured

SETTLED_S = 60


@pytest.fixture
def world(world: World) -> World:
    """Replica "a" owns session "s", and will be crowded."""
    open_at_a(world)
    return world


def beat(world: World, replica_id: str, running: int = 0, waiting: int = 0) -> HeartbeatReply:
    """A heartbeat of a replica that has KV of all sessions that it owns."""
    held = [
        SessionStatus(each.session_id, each.epoch, each.tokens, each.turns, 1.0, False, size_bytes=1)
        for each in world.cluster.sessions()
        if each.replica_id == replica_id
    ]
    return world.report(replica_id, *held, running=running, waiting=waiting)


def crowd(world: World) -> HeartbeatReply:
    """Replica "a" has reported for long that it is busy, and "b" that it is not."""
    for _ in range(SETTLED_S):
        world.clock.advance(1.0)
        beat(world, "a", running=2, waiting=6)
        beat(world, "b", running=1)
    return beat(world, "a", running=2, waiting=6)


def test_a_session_of_a_crowded_replica_moves_with_its_history(world: World) -> None:
    assert crowd(world).crowded
    assert world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("b", 2)
    assert world.cluster.resolve("s", False, "").replica_id == "b"
    record = world.cluster.load_session("s", 2, "b")
    assert unpack_tokens(record.history).tolist() == [1, 2]
    assert [result.idempotency_key for result in record.results] == ["key"]
    assert measured(world.cluster, "ownership_rebalanced") == 1
    assert measured(world.cluster, "ownership_transfers") == 1


def test_the_former_owner_is_refused_and_told_to_drop_it(world: World) -> None:
    crowd(world)
    assert world.cluster.offer_session("s", 1, "a")
    with pytest.raises(StaleEpoch):
        commit_turn(world.cluster, TurnRecord("s", 1, 1, 2, encode_tokens([3]), 1))
    with pytest.raises(StaleEpoch):
        world.cluster.load_session("s", 1, "a")
    still_held = SessionStatus("s", 1, 2, 1, 0.0, False)
    assert world.report("a", still_held).stale_sessions == ("s",)


def test_a_repeated_offer_moves_nothing_twice(world: World) -> None:
    """The actor may die before its answer is out. The call is repeated then."""
    crowd(world)
    assert world.cluster.offer_session("s", 1, "a")
    with pytest.raises(StaleEpoch):
        world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("b", 2)


def test_a_burst_of_offers_moves_only_what_evens_the_load_out(world: World) -> None:
    """Each move counts at once, before a replica reports it. After two of them, loads of almost 8 and 1 turns differ by
    less than the gap that a move needs."""
    names = [f"t{number}" for number in range(8)]
    for name in names:
        assert world.cluster.open_session(name, "", None, None, preferred="a").replica_id == "a"
    crowd(world)
    assert sum(world.cluster.offer_session(name, 1, "a") for name in names) == 2


def test_only_the_owner_offers(world: World) -> None:
    crowd(world)
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
        beat(world, "b", running=1)
        beat(world, "a", running=1)
    world.clock.advance(30.0)
    world.cluster.tick()
    beat(world, "b", running=1)
    beat(world, "a", running=8)
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_a_session_stays_where_nobody_is_crowded(world: World) -> None:
    for _ in range(SETTLED_S):
        world.clock.advance(1.0)
        crowded = [beat(world, "b", running=3).crowded, beat(world, "a", running=4).crowded]
    assert crowded == [False, False]
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_nothing_goes_to_who_drains_or_is_late(world: World) -> None:
    crowd(world)
    world.cluster.drain_replica("b")
    assert not world.cluster.offer_session("s", 1, "a")
    beat(world, "b")
    world.clock.advance(SILENCE_S / 3 + 0.1)
    assert not beat(world, "a", running=8).crowded
    assert not world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)


def test_a_log_that_fails_moves_nothing(world: World) -> None:
    crowd(world)
    world.store.disconnect()
    with pytest.raises(StoreError):
        world.cluster.offer_session("s", 1, "a")
    assert world.owner() == ("a", 1)
    assert measured(world.cluster, "ownership_rebalanced") == 0


def test_it_can_be_turned_off(log: LogSettings, clock: ManualClock) -> None:
    world = World(log, clock, replace(SETTINGS, rebalancing=None))
    world.beat("a", "b")
    open_at_a(world)
    assert not crowd(world).crowded
    assert not world.cluster.offer_session("s", 1, "a")
    world.store.disconnect()
