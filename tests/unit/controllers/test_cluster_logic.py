from __future__ import annotations

from pathlib import Path

import pytest
from cluster_world import IDLE_S, SILENCE_S, World, open_session
from manual_clock import ManualClock
from store_turns import commit_turn

from controllers.errors import (
    ControllerError,
    NoReplica,
    Overloaded,
    SessionExists,
    SessionNotFound,
    StaleEpoch,
    StoreError,
)
from controllers.records import Assignment, ReplicaStatus, SessionStatus, TurnRecord
from controllers.settings import SqliteLogSettings
from controllers.tokens import encode_tokens, unpack_tokens
from tests.unit.controllers.measured import measured


def _turn(assignment: Assignment, index: int, start_len: int, tokens: list[int]) -> TurnRecord:
    return TurnRecord(
        assignment.session_id, assignment.epoch, index, start_len, encode_tokens(tokens), len(tokens)
    )


def test_a_burst_of_opens_spreads(world: World) -> None:
    owners = [open_session(world, f"s{index}").replica_id for index in range(10)]
    assert sorted(owners) == ["a"] * 5 + ["b"] * 5


def test_most_free_kv_wins(world: World) -> None:
    world.beat("b", free_tokens=500)
    assert {open_session(world, f"s{index}").replica_id for index in range(5)} == {"a"}


def test_duplicates_are_refused_but_not_retries(world: World) -> None:
    first = world.cluster.open_session("s", "", None, None, open_key="k")
    retried = world.cluster.open_session("s", "", None, None, open_key="k")
    assert (retried.replica_id, retried.epoch, retried.fresh) == (first.replica_id, 1, False)
    for open_key in (None, "other"):
        with pytest.raises(SessionExists):
            world.cluster.open_session("s", "", None, None, open_key=open_key)


def test_an_assignment_tells_how_old_its_session_is(world: World) -> None:
    assert open_session(world).age_s == 0.0
    world.clock.advance(7.0)
    assert world.cluster.resolve("s", False, "").age_s == 7.0


def test_no_replica_leaves_no_session(tmp_path: Path, clock: ManualClock) -> None:
    world = World(SqliteLogSettings(str(tmp_path / "empty.db")), clock)
    with pytest.raises(NoReplica):
        open_session(world)
    assert world.cluster.sessions() == list(world.store.load_all_entries()) == []
    world.store.disconnect()


def test_resolve_keeps_the_owner(world: World) -> None:
    opened = open_session(world)
    resolved = world.cluster.resolve("s", False, "")
    assert (resolved.replica_id, resolved.epoch, resolved.fresh) == (opened.replica_id, 1, False)


def test_a_new_session_goes_where_some_of_its_kv_is(world: World) -> None:
    anywhere = world.cluster.resolve("s", True, "").replica_id
    (other,) = {each.replica_id for each in world.cluster.replicas()} - {anywhere}
    assert world.cluster.resolve("t", True, "", other).replica_id == other
    assert world.cluster.resolve("t", True, "", anywhere).replica_id == other, "it is there already"


def test_resolve_creates_on_request(world: World) -> None:
    with pytest.raises(SessionNotFound):
        world.cluster.resolve("s", False, "")
    assert world.cluster.resolve("s", True, "").fresh
    assert not world.cluster.resolve("s", True, "").fresh


def test_an_id_is_each_tenants_own(world: World) -> None:
    """A tenant could not use an id that another tenant had, and the refusal told it that the id exists."""
    open_session(world, tenant="acme")
    for tenant in ("", "other"):
        with pytest.raises(SessionNotFound):
            world.cluster.resolve("s", False, tenant)
        assert not world.cluster.close_session("s", tenant)
    opened = [open_session(world, tenant=tenant).session_id for tenant in ("", "other")]
    assert len({world.cluster.resolve("s", True, tenant).session_id for tenant in ("", "acme", "other")}) == 3
    assert world.cluster.close_session("s", "acme")
    assert [entry.session_id for entry in world.cluster.sessions()] == opened
    assert [entry.tenant for entry in world.cluster.sessions()] == ["", "other"]
    with pytest.raises(SessionNotFound):
        world.cluster.resolve("s", False, "acme")


def test_commits_reach_log_and_ledger(world: World) -> None:
    opened = open_session(world)
    commit_turn(world.cluster, _turn(opened, 0, 0, [1, 2, 3]))
    commit_turn(world.cluster, _turn(opened, 0, 0, [1, 2, 3]))
    record = world.cluster.load_session("s", 1, opened.replica_id)
    assert unpack_tokens(record.history).tolist() == [1, 2, 3]
    (entry,) = world.cluster.sessions()
    assert (entry.tokens, entry.turns) == (3, 1)
    assert measured(world.cluster, "controller_turns_committed") == 1


def test_load_is_fenced(world: World) -> None:
    opened = open_session(world)
    for epoch, replica_id in ((2, opened.replica_id), (1, "stranger")):
        with pytest.raises(StaleEpoch):
            world.cluster.load_session("s", epoch, replica_id)
    with pytest.raises(SessionNotFound):
        world.cluster.load_session("unknown", 1, opened.replica_id)


def test_a_lost_owner_is_replaced_and_fenced(world: World) -> None:
    opened = open_session(world)
    commit_turn(world.cluster, _turn(opened, 0, 0, [1]))
    assert world.cluster.report_unreachable(opened.replica_id, True)
    moved = world.cluster.resolve("s", False, "")
    assert (moved.epoch, moved.fresh) == (2, True)
    assert moved.replica_id != opened.replica_id
    with pytest.raises(StaleEpoch):
        commit_turn(world.cluster, _turn(opened, 1, 1, [2]))
    record = world.cluster.load_session("s", 2, moved.replica_id)
    assert unpack_tokens(record.history).tolist() == [1]
    commit_turn(world.cluster, _turn(moved, 1, 1, [3]))
    assert measured(world.cluster, "ownership_transfers") == 1
    assert measured(world.cluster, "controller_turns_refused") == 1


def test_after_a_false_alarm_moved_sessions_stay_moved(world: World) -> None:
    opened = open_session(world)
    world.cluster.report_unreachable(opened.replica_id, True)
    moved = world.cluster.resolve("s", False, "")
    held = SessionStatus("s", opened.epoch, 0, 0, 0.0, False)
    assert opened.replica_id not in {status.replica_id for status in world.cluster.replicas()}
    assert world.report(opened.replica_id, held, free_tokens=5000).stale_sessions == ("s",)
    assert world.report(opened.replica_id, free_tokens=5000).known
    assert world.cluster.resolve("s", False, "").replica_id == moved.replica_id
    assert open_session(world, "new").replica_id == opened.replica_id


def test_a_false_alarm_before_the_next_use_moves_nothing(world: World) -> None:
    opened = open_session(world)
    world.cluster.report_unreachable(opened.replica_id, True)
    world.cluster.register_replica(ReplicaStatus(opened.replica_id, 1000, 1000))
    assert world.cluster.resolve("s", False, "").epoch == 1


def test_a_silent_owner_is_replaced(world: World) -> None:
    opened = open_session(world)
    world.clock.advance(SILENCE_S + 1)
    assert world.cluster.resolve("s", False, "").epoch == 1, "it may only be slow, and nobody else is there"
    other = "b" if opened.replica_id == "a" else "a"
    world.beat(other)
    assert world.cluster.resolve("s", False, "").replica_id == other


def test_a_lost_owner_is_not_asked_even_if_nobody_else_is_there(world: World) -> None:
    open_session(world)
    for replica_id in ("a", "b"):
        world.cluster.report_unreachable(replica_id, True)
    with pytest.raises(NoReplica):
        world.cluster.resolve("s", False, "")


def test_a_draining_owner_hands_its_sessions_over_itself(world: World) -> None:
    """The controller knows of turns in flight only what the last heartbeat said, so it does not move a session by
    itself."""
    opened = open_session(world)
    world.cluster.drain_replica(opened.replica_id)
    held = SessionStatus("s", 1, 0, 0, 0.0, False)
    assert world.report(opened.replica_id, held).draining
    assert world.cluster.resolve("s", False, "").epoch == 1
    assert world.cluster.offer_session("s", 1, opened.replica_id)
    moved = world.cluster.resolve("s", False, "")
    assert moved.epoch == 2
    assert moved.replica_id != opened.replica_id
    assert measured(world.cluster, "ownership_drained") == 1


def test_a_draining_owner_keeps_sessions_nobody_else_can_take(world: World) -> None:
    opened = open_session(world)
    world.beat("a", "b", draining=True)
    assert world.cluster.resolve("s", False, "").epoch == 1
    assert not world.cluster.offer_session("s", 1, opened.replica_id)
    assert open_session(world, "new").replica_id in ("a", "b"), "better than none"
    world.cluster.register_replica(ReplicaStatus("c", 1000, 1000))
    assert world.cluster.offer_session("s", 1, opened.replica_id)
    assert world.cluster.resolve("s", False, "").replica_id == "c"


def test_a_replica_that_drains_gets_no_session_whatever_it_says(world: World) -> None:
    """Such a replica used to register again by its heartbeat as the emptiest one. It then got sessions until it was
    gone."""
    world.cluster.drain_replica("a")
    world.beat("a", free_tokens=9000)
    world.cluster.register_replica(ReplicaStatus("a", 9000, 9000))
    assert {open_session(world, f"s{index}").replica_id for index in range(5)} == {"b"}
    assert measured(world.cluster, "controller_replicas_draining") == 1


def test_sessions_of_one_that_said_farewell_move(world: World) -> None:
    opened = open_session(world)
    assert world.cluster.deregister_replica(opened.replica_id) == 1
    assert world.cluster.resolve("s", False, "").epoch == 2


def test_a_step_of_the_wall_clock_moves_nothing(world: World) -> None:
    """A step of 11 s used to move 180 of 200 sessions to one replica."""
    before = [open_session(world, f"s{index}") for index in range(10)]
    world.wall.advance(11.0)
    world.beat("b")  # the first to report would get the others' sessions
    for opened in before:
        resolved = world.cluster.resolve(opened.session_id, False, "")
        assert (resolved.replica_id, resolved.epoch) == (opened.replica_id, 1)
    world.wall.advance(-3600.0)
    assert {world.cluster.resolve(each.session_id, False, "").epoch for each in before} == {1}


def test_a_pause_of_the_controller_is_held_against_nobody(world: World) -> None:
    """The frozen controller could not hear replicas. Calls that come before the replicas' heartbeats move no
    session."""
    before = [open_session(world, f"s{index}") for index in range(10)]
    world.cluster.tick()
    world.clock.advance(60.0)
    world.beat("b")  # the first to report would get the others' sessions
    for opened in before:
        assert world.cluster.resolve(opened.session_id, False, "").epoch == 1
    world.cluster.tick()
    assert {world.cluster.resolve(each.session_id, False, "").epoch for each in before} == {1}
    # From here on the controller is there to hear them.
    for _ in range(int(SILENCE_S) * 4 + 1):
        world.clock.advance(0.25)
        world.cluster.tick()
        world.beat("b")
    assert {world.cluster.resolve(each.session_id, False, "").replica_id for each in before} == {"b"}


def test_a_restart_keeps_ownership(world: World) -> None:
    opened = open_session(world)
    commit_turn(world.cluster, _turn(opened, 0, 0, [1, 2]))
    before = world.cluster.sessions()
    cluster = world.restart()
    assert cluster.sessions() == before
    assert cluster.resolve("s", False, "") == Assignment("s", opened.replica_id, 1, fresh=False)
    commit_turn(cluster, _turn(opened, 0, 0, [1, 2]))
    commit_turn(cluster, _turn(opened, 1, 2, [3]))


def test_after_a_restart_owners_that_stay_away_are_replaced(world: World) -> None:
    opened = open_session(world)
    world.restart()
    other = "b" if opened.replica_id == "a" else "a"
    world.clock.advance(SILENCE_S + 1)
    world.beat(other)
    assert world.cluster.resolve("s", False, "").replica_id == other


def moves_and_unheard_owners(world: World) -> tuple[float, float]:
    return (
        measured(world.cluster, "ownership_transfers"),
        measured(world.cluster, "ownership_unheard_owners"),
    )


@pytest.mark.parametrize("asked_early", [False, True])
def test_sessions_of_owners_that_were_gone_before_the_start_are_told_apart(
    world: World, asked_early: bool
) -> None:
    """Everything was stopped and started again. Each session's first turn then seemed to lose its replica."""
    opened = open_session(world)
    world.restart()
    if asked_early:  # a front end, which knows the owner from the log, does not reach it
        world.cluster.report_unreachable(opened.replica_id, False)
    world.clock.advance(SILENCE_S + 1)
    world.beat("new")
    assert world.cluster.resolve("s", False, "").replica_id == "new"
    assert moves_and_unheard_owners(world) == (1, 1)
    world.beat("other")
    world.cluster.report_unreachable("new", True)
    assert world.cluster.resolve("s", False, "").replica_id == "other"
    assert moves_and_unheard_owners(world) == (2, 1)


def test_an_owner_that_was_heard_after_the_start_is_lost_when_it_goes(world: World) -> None:
    opened = open_session(world)
    world.restart()
    world.beat("a", "b")
    world.cluster.report_unreachable(opened.replica_id, True)
    world.cluster.resolve("s", False, "")
    assert moves_and_unheard_owners(world) == (1, 0)


def test_close(world: World) -> None:
    opened = open_session(world)
    with pytest.raises(StaleEpoch):
        world.cluster.close_session("s", epoch=2)
    assert world.cluster.close_session("s", epoch=1)
    assert not world.cluster.close_session("s")
    with pytest.raises(SessionNotFound):
        commit_turn(world.cluster, _turn(opened, 0, 0, [1]))


def test_a_turn_of_a_closed_session_cannot_commit_into_its_namesake(world: World) -> None:
    opened = open_session(world)
    world.cluster.close_session("s")
    world.restart()
    world.beat("a", "b")
    assert open_session(world).epoch == 2
    with pytest.raises(StaleEpoch):
        commit_turn(world.cluster, _turn(opened, 0, 0, [1]))


def test_heartbeats_name_sessions_that_are_closed(world: World) -> None:
    opened = open_session(world)
    held = SessionStatus("s", 1, 0, 0, 3.0, False, size_bytes=42)
    assert world.report(opened.replica_id, held).stale_sessions == ()
    assert measured(world.cluster, "controller_session_size_bytes") == 42
    world.cluster.close_session("s")
    assert world.report(opened.replica_id, held).stale_sessions == ("s",)


def test_the_session_limit(world: World) -> None:
    for index in range(20):
        open_session(world, f"s{index}")
    world.clock.advance(IDLE_S - 5)
    world.beat("a", "b")
    with pytest.raises(Overloaded) as caught:
        open_session(world, "more")
    assert caught.value.retry_after_s == 5.0
    world.clock.advance(5 + 0.1)
    world.beat("a", "b")
    assert open_session(world, "more").fresh
    assert len(world.cluster.sessions()) == 1


def test_a_failing_log_changes_no_ledger(world: World) -> None:
    opened = open_session(world)
    before = world.cluster.sessions()
    world.store.disconnect()
    for operation in (
        lambda: commit_turn(world.cluster, _turn(opened, 0, 0, [1])),
        lambda: open_session(world, "new"),
        lambda: world.cluster.close_session("s"),
    ):
        with pytest.raises(StoreError):
            operation()
    assert world.cluster.sessions() == before


def test_an_owner_that_is_known_is_told_without_the_log(world: World) -> None:
    """While the log was away, every lookup of a session that had not been used for half a minute used to fail."""
    opened = open_session(world)
    world.clock.advance(60)
    world.beat("a", "b")
    world.store.disconnect()
    assert world.cluster.resolve("s", False, "").replica_id == opened.replica_id
    (entry,) = world.cluster.sessions()
    assert entry.last_used_s == world.clock.now_s


def test_a_commit_that_found_no_log_was_not_refused(world: World) -> None:
    opened = open_session(world)
    world.store.disconnect()
    with pytest.raises(StoreError):
        commit_turn(world.cluster, _turn(opened, 0, 0, [1]))
    assert measured(world.cluster, "controller_turns_refused") == 0
    assert measured(world.cluster, "controller_commits_failed") == 1


def test_figures(world: World) -> None:
    opened = open_session(world)
    with pytest.raises(ControllerError):
        commit_turn(world.cluster, _turn(opened, 5, 0, [1]))
    commit_turn(world.cluster, _turn(opened, 0, 0, [1, 2]))
    world.report(opened.replica_id, SessionStatus("s", 1, 2, 1, 0.0, True))
    expected = {
        "sessions_in_turn": 1,
        "sessions_idle": 0,
        "sessions_unowned": 0,
        "session_tokens": 2,
        "replicas_live": 2,
        "turns_refused": 1,
    }
    assert {name: measured(world.cluster, f"controller_{name}") for name in expected} == expected
    assert measured(world.cluster, "controller_store_seconds", operation="commit") == 2
    world.cluster.report_unreachable(opened.replica_id, True)
    assert measured(world.cluster, "controller_sessions_unowned") == 1


def test_a_lost_replica_holds_no_kv(world: World) -> None:
    """The list and the sum told of its KV until its sessions were used again."""
    opened = open_session(world)
    world.report(opened.replica_id, SessionStatus("s", 1, 0, 0, 0.0, True, size_bytes=42))
    (held,) = world.cluster.sessions()
    assert (held.size_bytes, held.in_turn) == (42, True)
    assert measured(world.cluster, "controller_session_size_bytes") == 42
    world.cluster.report_unreachable(opened.replica_id, True)
    view = world.cluster.watch.view(None, 1)
    for entry in (*world.cluster.sessions(), world.cluster.session("s"), *view.recent):
        assert (entry.replica_id, entry.size_bytes, entry.in_turn) == (opened.replica_id, 0, False)
    assert measured(world.cluster, "controller_session_size_bytes") == 0


def test_replicas_carry_the_ledgers_count(world: World) -> None:
    opened = open_session(world)
    counts = {status.replica_id: status.sessions for status in world.cluster.replicas()}
    assert counts == {opened.replica_id: 1, "b" if opened.replica_id == "a" else "a": 0}
