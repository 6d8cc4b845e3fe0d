"""Sessions end when nobody uses them any more, and not before."""

from __future__ import annotations

import pytest
from cluster_world import IDLE_S, SILENCE_S, World, open_session

from controllers import session_ends
from controllers.records import ReplicaStatus, SessionStatus


def test_expiry_of_sessions_whose_owner_is_gone(world: World) -> None:
    opened = open_session(world)
    world.cluster.heartbeat(ReplicaStatus(opened.replica_id, 1, 1), [SessionStatus("s", 1, 0, 0, 0.0, True)])
    world.cluster.report_unreachable(opened.replica_id, True)
    world.clock.advance(IDLE_S)
    assert world.cluster.expire_idle() == []
    world.clock.advance(0.1)
    assert world.cluster.expire_idle() == ["s"]
    assert world.cluster.sessions() == list(world.store.load_all_entries()) == []


def test_a_turn_in_flight_never_expires(world: World) -> None:
    opened = open_session(world)
    status = ReplicaStatus(opened.replica_id, 1000, 1000)
    for _ in range(30):
        world.clock.advance(SILENCE_S)
        world.cluster.heartbeat(status, [SessionStatus("s", 1, 0, 0, 0.0, True)])
        assert world.cluster.expire_idle() == []
    world.cluster.heartbeat(status, [SessionStatus("s", 1, 0, 0, 0.0, False)])
    for _ in range(10):
        world.clock.advance(SILENCE_S)
        world.cluster.heartbeat(status, [])
        assert world.cluster.expire_idle() == []
    world.clock.advance(0.1)
    assert world.cluster.expire_idle() == ["s"]


def test_what_a_live_owner_holds_is_its_own_to_expire(world: World) -> None:
    """The owner may have begun a turn that the controller has not heard of."""
    opened = open_session(world)
    status = ReplicaStatus(opened.replica_id, 1000, 1000)
    world.clock.advance(IDLE_S * 2)
    world.beat(opened.replica_id)
    world.cluster.heartbeat(status, [SessionStatus("s", 1, 0, 0, IDLE_S * 2, False)])
    assert world.cluster.expire_idle() == []
    world.clock.advance(SILENCE_S + 1)
    assert world.cluster.expire_idle() == ["s"]


def test_loading_counts_as_use(world: World) -> None:
    opened = open_session(world)
    world.clock.advance(IDLE_S + 1)
    world.beat("a", "b")
    world.cluster.load_session("s", 1, opened.replica_id)
    assert world.cluster.expire_idle() == []


def test_one_call_ends_some_sessions_and_the_next_one_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a night without a cluster, one call ended a hundred thousand sessions, and held up all others."""
    monkeypatch.setattr(session_ends, "MOST_ENDED_AT_ONCE", 3)
    for number in range(5):
        world.cluster.open_session(f"s{number}", "", None, None)
    world.clock.advance(IDLE_S + 1)
    world.beat("a", "b")
    assert [len(world.cluster.expire_idle()) for _ in range(3)] == [3, 2, 0]
    assert world.cluster.sessions() == list(world.store.load_all_entries()) == []


def test_a_move_is_no_use_and_a_takeover_is_one(world: World) -> None:
    """Each drain restarted the idle clocks of all sessions of the replica, so that unused ones never ended."""
    opened = open_session(world)
    opened_s = world.clock.now_s
    world.clock.advance(IDLE_S - 1)
    world.beat("a", "b")
    world.cluster.drain_replica(opened.replica_id)
    assert world.cluster.offer_session("s", 1, opened.replica_id)
    (entry,) = world.cluster.sessions()
    assert (entry.epoch, entry.last_used_s) == (2, opened_s)
    world.cluster.report_unreachable(entry.replica_id, True)
    assert world.cluster.resolve("s", False, "").epoch == 3
    (entry,) = world.cluster.sessions()
    assert entry.last_used_s == world.clock.now_s
    (entry,) = world.restart().sessions()
    assert entry.last_used_s == world.clock.now_s


def test_nothing_expires_right_after_a_restart(world: World) -> None:
    open_session(world)
    world.clock.advance(IDLE_S * 10)
    world.restart()
    world.clock.advance(SILENCE_S)
    assert world.cluster.expire_idle() == []
    world.clock.advance(SILENCE_S)
    assert world.cluster.expire_idle() == ["s"]


def test_use_after_a_pause_is_noted_durably(world: World) -> None:
    open_session(world)
    world.clock.advance(60)
    world.beat("a", "b")
    world.cluster.resolve("s", False, "")
    (entry,) = world.restart().sessions()
    assert entry.last_used_s == world.clock.now_s
