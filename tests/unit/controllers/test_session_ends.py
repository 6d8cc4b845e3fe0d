"""Sessions end when nobody uses them any more, and not before."""

from __future__ import annotations

import pytest
from cluster_world import IDLE_S, SILENCE_S, World, open_session
from store_turns import commit_turn, turn_of

from controllers import session_ends
from controllers.errors import StoreError
from controllers.records import ForkOrder, SessionStatus
from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from tests.unit.controllers.measured import measured


def test_expiry_of_sessions_whose_owner_is_gone(world: World) -> None:
    opened = open_session(world)
    world.report(opened.replica_id, SessionStatus("s", 1, 0, 0, 0.0, True))
    world.cluster.report_unreachable(opened.replica_id, True)
    world.clock.advance(IDLE_S)
    assert world.cluster.expire_idle() == []
    world.clock.advance(0.1)
    assert world.cluster.expire_idle() == ["s"]
    assert world.cluster.sessions() == list(world.store.load_all_entries()) == []


def test_a_turn_in_flight_never_expires(world: World) -> None:
    opened = open_session(world)
    for _ in range(30):
        world.clock.advance(SILENCE_S)
        world.report(opened.replica_id, SessionStatus("s", 1, 0, 0, 0.0, True))
        assert world.cluster.expire_idle() == []
    world.report(opened.replica_id, SessionStatus("s", 1, 0, 0, 0.0, False))
    for _ in range(10):
        world.clock.advance(SILENCE_S)
        world.report(opened.replica_id)
        assert world.cluster.expire_idle() == []
    world.clock.advance(0.1)
    assert world.cluster.expire_idle() == ["s"]


def test_what_a_live_owner_holds_is_its_own_to_expire(world: World) -> None:
    """The owner may have begun a turn that the controller has not heard of."""
    opened = open_session(world)
    world.clock.advance(IDLE_S * 2)
    world.beat(opened.replica_id)
    world.report(opened.replica_id, SessionStatus("s", 1, 0, 0, IDLE_S * 2, False))
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


def _open_broken(world: World, *names: str) -> None:
    """Opens sessions that cannot be deleted: each must cut a segment that is written under a lost key."""
    world.restart(LogCipher([bytes(KEY_BYTES)], encrypts=True))
    world.beat("a", "b")
    for name in names:
        owner = open_session(world, name).replica_id
        commit_turn(world.cluster, turn_of(0, 0, list(range(10)), session_id=name))
        world.cluster.fork_session(name, 1, owner, ForkOrder(f"fork-of-{name}", f"key of {name}", 4, 5e5))
    world.restart(LogCipher([bytes([1]) * KEY_BYTES], encrypts=True))
    world.beat("a", "b")
    with pytest.raises(StoreError):
        world.store.close(names[0])


def _close_errors(world: World) -> float:
    return measured(world.cluster, "controller_store_errors", operation="close")


def test_a_session_that_cannot_be_deleted_keeps_no_other_from_ending(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It came first at each look, and nothing behind it ended: one lost key filled the cluster."""
    _open_broken(world, "broken")
    world.clock.advance(1)
    for number in range(18):
        open_session(world, f"s{number}")
    world.clock.advance(IDLE_S + SILENCE_S)
    world.beat("a", "b")
    assert world.cluster.count() == 20, "all that there may be"
    assert open_session(world, "one-more").fresh
    assert {entry.session_id for entry in world.cluster.sessions()} == {
        "broken",
        "fork-of-broken",
        "one-more",
    }
    assert _close_errors(world) == 1
    assert "session 'broken' cannot be ended" in caplog.text
    assert world.cluster.expire_idle() == [], "it is tried again, and stays"
    assert _close_errors(world) == 2


def test_many_that_cannot_be_deleted_cost_a_few_tries_at_a_time_and_end_once_they_can(world: World) -> None:
    """Several failures in a row look like a log that is away, so a call ends. The next one begins with others."""
    broken = [f"broken{number}" for number in range(5)]
    _open_broken(world, *broken)
    open_session(world, "sound")
    world.clock.advance(IDLE_S + SILENCE_S)
    world.beat("a", "b")
    assert world.cluster.expire_idle() == []
    assert _close_errors(world) == session_ends.MOST_FAILURES_IN_A_ROW
    assert world.cluster.expire_idle() == ["sound"]
    before = _close_errors(world)
    assert world.cluster.expire_idle() == []
    assert _close_errors(world) == before + session_ends.MOST_FAILURES_IN_A_ROW
    world.restart(LogCipher([bytes([1]) * KEY_BYTES, bytes(KEY_BYTES)], encrypts=True))
    world.beat("a", "b")
    world.clock.advance(SILENCE_S + 1)
    assert sorted(world.cluster.expire_idle()) == broken


def test_a_damaged_session_keeps_no_other_from_ending(world: World) -> None:
    owner = open_session(world).replica_id
    commit_turn(world.cluster, turn_of(0, 0, [1, 2, 3]))
    world.cluster.fork_session("s", 1, owner, ForkOrder("child", "key", 2, 5e5))
    world.store._connection.execute("DELETE FROM segments")
    world.clock.advance(1)
    open_session(world, "sound")
    world.clock.advance(IDLE_S + SILENCE_S)
    world.beat("a", "b")
    assert world.cluster.expire_idle() == ["sound"]
    assert _close_errors(world) == 1
