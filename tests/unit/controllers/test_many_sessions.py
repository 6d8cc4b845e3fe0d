"""Operations of the controller and of a session book cost the same however many sessions there are. The cost is
counted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from manual_clock import ManualClock
from session_book import make_chain
from store_turns import commit_turn, turn_of

from controllers import session_ends
from controllers.cluster import Cluster
from controllers.ownership import OwnershipLedger
from controllers.records import ForkOrder, LedgerEntry, ReplicaStatus, SessionRecord, SessionReport
from controllers.session import SessionController
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from controllers.turns import Turn

IDLE_S = 50.0
COUNTS = pytest.mark.parametrize("count", [10, 3000])


class NeverWalked(dict[Any, Any]):
    """A dict that nobody may iterate over."""

    def _walked(self, *_: object) -> NoReturn:
        raise AssertionError("looked at all sessions")

    __iter__ = keys = values = items = copy = _walked


@pytest.fixture
def cluster(clock: ManualClock) -> Iterator[Cluster]:
    store = SqliteSessionStore(":memory:", clock=clock)
    yield Cluster(ClusterSettings(session_timeout_s=IDLE_S), store, clock, clock)
    store.disconnect()


def names_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sessions of which the ledger asks from now on when they expire."""
    looked: list[str] = []
    expires_at_s = OwnershipLedger.expires_at_s

    def counted(self: OwnershipLedger, entry: LedgerEntry) -> float:
        looked.append(entry.session_id)
        return expires_at_s(self, entry)

    monkeypatch.setattr(OwnershipLedger, "expires_at_s", counted)
    return looked


def open_sessions(cluster: Cluster, count: int) -> None:
    for replica_id in "ab":
        cluster.register_replica(ReplicaStatus(replica_id, 1000, 1000))
    for number in range(count):
        cluster.open_session(f"s{number}", "acme" if number % 2 else "", None, None)
    cluster._ledger._rows = NeverWalked(cluster._ledger._rows)


CALLS: dict[str, Callable[[Cluster], object]] = {
    "heartbeat": lambda cluster: cluster.heartbeat(ReplicaStatus("a", 1000, 1000), SessionReport(1, 0)),
    "expire_idle": Cluster.expire_idle,
    "measures": Cluster.measures,
    "replicas": Cluster.replicas,
    "count": Cluster.count,
    "page": lambda cluster: cluster.sessions(None, "acme s1", 3),
    "session": lambda cluster: cluster.session("s0"),
    "open": lambda cluster: cluster.open_session("new", "", None, None),
    "resolve": lambda cluster: cluster.resolve("s0", False, ""),
    "commit": lambda cluster: commit_turn(cluster, turn_of(0, 0, [1], session_id="s0")),
    "fork": lambda cluster: cluster.fork_session(
        "s0", 1, cluster.session("s0").replica_id, ForkOrder("child", "key")
    ),
    "close": lambda cluster: cluster.close_session("s0"),
    "lost": lambda cluster: cluster.report_unreachable("a", True),
    "deregister": lambda cluster: cluster.deregister_replica("a"),
    "tick": Cluster.tick,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_looks_at_all_sessions(cluster: Cluster, clock: ManualClock, name: str) -> None:
    open_sessions(cluster, 20)
    clock.advance(11.0)
    for replica_id in "ab":
        cluster.register_replica(ReplicaStatus(replica_id, 1000, 1000))
    CALLS[name](cluster)


@COUNTS
def test_the_ledger_looks_at_those_that_may_have_expired(
    cluster: Cluster, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It used to look at every session, twice, for each question."""
    open_sessions(cluster, count)
    clock.advance(IDLE_S - 10)
    for number in range(3, count):
        cluster._ledger.touch(f"s{number}" if number % 2 == 0 else f"acme s{number}")
    clock.advance(10.1)
    assert sorted(cluster.expire_idle()) == ["acme s1", "s0", "s2"]
    looked = names_looked_at(monkeypatch)
    for _ in range(30):
        clock.advance(1.0)
        assert cluster.expire_idle() == []
    assert looked == []


@COUNTS
def test_ending_some_of_the_sessions_that_have_expired_looks_at_no_others(
    cluster: Cluster, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """After a night without a cluster, each call ended some sessions and looked at all others. A hundred thousand held
    up the controller for a second, again and again."""
    monkeypatch.setattr(session_ends, "MOST_ENDED_AT_ONCE", 4)
    open_sessions(cluster, count)
    clock.advance(IDLE_S + 0.1)
    looked: list[str] = []
    get = OwnershipLedger.get

    def counted(self: OwnershipLedger, session_id: str) -> LedgerEntry:
        looked.append(session_id)
        return get(self, session_id)

    monkeypatch.setattr(OwnershipLedger, "get", counted)
    assert len(cluster.expire_idle()) == 4
    assert len(set(looked)) == 4


def test_sessions_that_come_and_go_make_nobody_look_at_the_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended sessions stayed in a heap. When they were more than the others, it was built anew: half a second for a
    hundred thousand sessions, at the opening of one."""
    open_sessions(cluster, 100)
    looked = names_looked_at(monkeypatch)
    for _ in range(200):
        cluster.open_session("new", "", None, None)
        assert cluster.close_session("new", "")
    assert set(looked) == {"new"}
    assert len(cluster._ledger._expiries) == 100


@COUNTS
def test_a_session_book_looks_at_those_that_may_have_expired(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    book = SessionController(clock, IDLE_S, make_chain=make_chain)
    for number in range(count):
        book.adopt(SessionRecord(f"s{number}", "", 1, "a"))
    turn = book.begin_turn("s1", 1)
    clock.advance(IDLE_S - 10)
    for number in range(2, count):
        used = book.begin_turn(f"s{number}", 1)
        assert isinstance(used, Turn)
        book.abort_turn(used)
    clock.advance(10.1)
    assert book.expired() == ["s0"]
    book.drop("s0")
    looked: list[str] = []
    expires_at_s = SessionController._expires_at_s

    def counted(self: SessionController, session_id: str) -> float:
        looked.append(session_id)
        return expires_at_s(self, session_id)

    monkeypatch.setattr(SessionController, "_expires_at_s", counted)
    for _ in range(30):
        clock.advance(1.0)
        assert book.expired() == []
    assert looked == []
    assert isinstance(turn, Turn)
    book.abort_turn(turn)
    clock.advance(IDLE_S + 0.1)
    assert "s1" in book.expired()


def test_the_garbage_collector_looks_at_no_session(cluster: Cluster) -> None:
    """With a million entries, each full round of the garbage collector used to stop the controller for a second."""
    open_sessions(cluster, 100)
    commit_turn(cluster, turn_of(0, 0, [1], session_id="s0"))
    gc.collect()
    ledger = cluster._ledger
    assert not any(map(gc.is_tracked, [*dict.values(ledger._rows), *ledger._expiries._in_order]))


@COUNTS
def test_a_page_costs_its_own_length(cluster: Cluster, count: int) -> None:
    """A page used to be cut out of a copy of the whole ledger, whoever asked."""
    open_sessions(cluster, count)
    read: list[str] = []

    class Counted(NeverWalked):
        def get(self, key: str, default: Any = None) -> Any:
            read.append(key)
            return super().get(key, default)

    cluster._ledger._rows = Counted(dict.items(cluster._ledger._rows))
    middle = sorted(f"s{number}" for number in range(0, count, 2))[2]
    assert [entry.session_id > middle for entry in cluster.sessions("", middle, 2)] == [True, True]
    assert len(read) == 2
