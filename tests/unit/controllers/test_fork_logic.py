"""Forks: a child begins with its parent's first tokens, completely or not at all. After that the two are separate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from manual_clock import ManualClock
from session_book import make_chain
from store_turns import commit_turn

from controllers.cluster import Cluster
from controllers.errors import (
    InvalidFork,
    InvalidTimeout,
    Overloaded,
    SessionClosing,
    SessionExists,
    SessionNotFound,
    StaleEpoch,
    TurnInFlight,
    TurnNotInFlight,
)
from controllers.ownership import TenantUse
from controllers.records import ForkOrder, ReplicaStatus, SessionRecord, TurnRecord
from controllers.session import SessionController
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from controllers.tokens import encode_tokens, unpack_tokens
from controllers.turns import Turn
from tests.unit.controllers.measured import measured

PARENT = SessionRecord("p", "tenant", 1, "a", timeout_s=30.0, capacity_tokens=99, created_s=5.0)
CHILD = SessionRecord("c", "tenant", 1, "a", timeout_s=40.0, created_s=6.0, open_key="k")


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[SqliteSessionStore]:
    store = SqliteSessionStore(tmp_path / "sessions.db", clock=clock)
    yield store
    store.disconnect()


# The cluster controller


@pytest.fixture
def cluster(store: SqliteSessionStore, clock: ManualClock) -> Cluster:
    return _cluster(store, clock)


def _cluster(store: SqliteSessionStore, clock: ManualClock) -> Cluster:
    cluster = Cluster(ClusterSettings(max_sessions=3), store, clock, clock)
    for replica_id in ("a", "b"):
        cluster.register_replica(ReplicaStatus(replica_id, 1000, 1000))
    return cluster


def _opened(cluster: Cluster) -> str:
    """Opens a parent of six tokens. Returns its owner."""
    owner = cluster.open_session("p", "", 30.0, 99).replica_id
    commit_turn(cluster, TurnRecord("p", 1, 0, 0, encode_tokens(range(6)), 6))
    return owner


def test_the_child_is_placed_beside_its_parent(
    cluster: Cluster, store: SqliteSessionStore, clock: ManualClock
) -> None:
    owner = _opened(cluster)
    child = cluster.fork_session("p", 1, owner, ForkOrder("c", "k", 4))
    assert (child.replica_id, child.tenant, child.timeout_s, child.capacity_tokens) == (owner, "", 30.0, 99)
    assert child.history == b""
    other = cluster.fork_session("p", 1, owner, ForkOrder("d", "l", timeout_s=7.0))
    assert (other.replica_id, other.timeout_s) == (owner, 7.0)
    for entries in (cluster.sessions(), _cluster(store, clock).sessions()):
        assert {entry.session_id: entry.tokens for entry in entries} == {"p": 6, "c": 4, "d": 6}
    assert unpack_tokens(cluster.load_session("c", 1, owner).history).tolist() == [0, 1, 2, 3]
    assert measured(cluster, "controller_sessions_forked") == 2
    with pytest.raises(Overloaded):
        cluster.fork_session("p", 1, owner, ForkOrder("e", "m"))


def test_a_repeated_fork_gives_the_same_child(cluster: Cluster) -> None:
    owner = _opened(cluster)
    order = ForkOrder("c", "k", 4)
    first = cluster.fork_session("p", 1, owner, order)
    assert cluster.fork_session("p", 1, owner, order) == first
    for other in (replace(order, fork_key="l"), replace(order, length=5), replace(order, child_id="p")):
        with pytest.raises(SessionExists) as caught:
            cluster.fork_session("p", 1, owner, other)
        assert caught.value.param == "new_session_id"
    commit_turn(cluster, TurnRecord("c", 1, 0, 4, encode_tokens([9]), 1))
    with pytest.raises(SessionExists):
        cluster.fork_session("p", 1, owner, order)


def test_a_child_whose_replica_died_follows_its_parent(cluster: Cluster) -> None:
    """The replica died after the log's commit and before its answer. The repeated call finds both sessions at the new
    owner."""
    owner = _opened(cluster)
    order = ForkOrder("c", "k", 4)
    cluster.fork_session("p", 1, owner, order)
    cluster.report_unreachable(owner, True)
    moved = cluster.resolve("p", False, "")
    child = cluster.fork_session("p", moved.epoch, moved.replica_id, order)
    assert (child.replica_id, child.epoch) == (moved.replica_id, 2)
    assert unpack_tokens(cluster.load_session("c", 2, moved.replica_id).history).tolist() == [0, 1, 2, 3]


def test_only_the_owner_forks(cluster: Cluster) -> None:
    owner = _opened(cluster)
    stranger = "b" if owner == "a" else "a"
    for epoch, replica_id in ((2, owner), (1, stranger)):
        with pytest.raises(StaleEpoch):
            cluster.fork_session("p", epoch, replica_id, ForkOrder("c", "k"))
    with pytest.raises(SessionNotFound):
        cluster.fork_session("x", 1, owner, ForkOrder("c", "k"))
    with pytest.raises(InvalidFork):
        cluster.fork_session("p", 1, owner, ForkOrder("c", "k", 7))
    assert [entry.session_id for entry in cluster.sessions()] == ["p"]


# The replica's sessions


@pytest.fixture
def sessions(clock: ManualClock) -> SessionController:
    sessions = SessionController(clock, 60.0, make_chain=make_chain)
    sessions.adopt(replace(PARENT, history=encode_tokens([1, 2, 3, 4])))
    return sessions


def _history(sessions: SessionController, session_id: str) -> list[int]:
    turn = sessions.begin_turn(session_id, 1)
    assert isinstance(turn, Turn)
    sessions.abort_turn(turn)
    return list(turn.history[: turn.history_len])


def _turn(sessions: SessionController, session_id: str, tokens: list[int]) -> None:
    turn = sessions.begin_turn(session_id, 1)
    assert isinstance(turn, Turn)
    sessions.commit_turn(turn, sessions.prepare_commit(turn, tokens, [], b""))


def test_the_child_has_its_own_history(sessions: SessionController, clock: ManualClock) -> None:
    fork = sessions.begin_fork("p", 1, 3)
    assert list(fork.history[: fork.history_len]) == [1, 2, 3]
    assert not sessions.knows("c", 1)
    clock.advance(5.0)
    sessions.finish_fork(fork, CHILD)
    _turn(sessions, "c", [7])
    _turn(sessions, "p", [8])
    assert _history(sessions, "c") == [1, 2, 3, 7]
    assert _history(sessions, "p") == [1, 2, 3, 4, 8]
    sessions.drop("p")
    assert _history(sessions, "c") == [1, 2, 3, 7]
    clock.advance(41.0)
    assert sessions.expired() == ["c"]


def test_a_fork_takes_the_place_of_a_turn(sessions: SessionController) -> None:
    fork = sessions.begin_fork("p", 1, None)
    assert fork.history_len == 4
    with pytest.raises(TurnInFlight, match="is being forked"):
        sessions.begin_turn("p", 1)
    with pytest.raises(TurnInFlight):
        sessions.begin_fork("p", 1, None)
    with pytest.raises(TurnInFlight):
        sessions.drop("p")
    assert sessions.close("p") == ""
    sessions.abort_fork(fork)
    assert not sessions.knows("c", 1)
    assert sessions.is_closed("p")
    with pytest.raises(SessionClosing):
        sessions.begin_fork("p", 1, None)
    for end in (lambda: sessions.abort_fork(fork), lambda: sessions.finish_fork(fork, CHILD)):
        with pytest.raises(TurnNotInFlight):
            end()


def test_a_fork_that_comes_to_nothing_is_no_use_of_its_session(clock: ManualClock) -> None:
    """A drain that no replica could help with restarted the idle clocks again and again."""
    sessions = SessionController(clock, 10.0, make_chain=make_chain)
    sessions.adopt(SessionRecord("p", "", 1, "a"))
    clock.advance(9.0)
    sessions.abort_fork(sessions.begin_fork("p", 1, 0))
    assert sessions.expired() == []
    clock.advance(1.5)
    assert sessions.expired() == ["p"]


def test_refused_forks(sessions: SessionController) -> None:
    for length in (-1, 5):
        with pytest.raises(InvalidFork) as caught:
            sessions.begin_fork("p", 1, length)
        assert caught.value.param == "length"
    with pytest.raises(StaleEpoch):
        sessions.begin_fork("p", 2, None)
    with pytest.raises(SessionNotFound):
        sessions.begin_fork("x", 1, None)
    turn = sessions.begin_turn("p", 1)
    assert isinstance(turn, Turn)
    with pytest.raises(TurnInFlight, match="has a turn in flight"):
        sessions.begin_fork("p", 1, None)
    sessions.abort_turn(turn)
    sessions.abort_fork(sessions.begin_fork("p", 1, 0))


def test_a_tenant_takes_no_more_of_the_log_than_it_may(store: SqliteSessionStore, clock: ManualClock) -> None:
    """A tenant could take every slot forever, and fill the log with forks."""
    settings = ClusterSettings(max_timeout_s=60.0, tenant_sessions=3, tenant_history_tokens=16)
    cluster = Cluster(settings, store, clock, clock)
    cluster.register_replica(ReplicaStatus("a", 1000, 1000))
    _opened(cluster)
    cluster.fork_session("p", 1, "a", ForkOrder("c", "k"))
    with pytest.raises(Overloaded, match="have 12 tokens; 16 is its limit"):
        cluster.fork_session("p", 1, "a", ForkOrder("d", "l"))
    cluster.fork_session("p", 1, "a", ForkOrder("d", "l", length=4))
    with pytest.raises(Overloaded, match="3 sessions open"):
        cluster.open_session("e", "", None, None)
    assert cluster.open_session("e", "other", None, None).fresh, "another tenant has its own"
    cluster.close_session("c")
    assert cluster.open_session("e", "", 60.0, None).fresh
    with pytest.raises(InvalidTimeout):
        cluster.fork_session("p", 1, "a", ForkOrder("f", "m", timeout_s=61.0))
    with pytest.raises(InvalidTimeout):
        cluster.open_session("f", "other", 1e9, None)
    assert cluster._ledger.use_of_tenant("") == TenantUse(3, 10)
