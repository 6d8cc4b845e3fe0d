"""The log records that a close waits for a turn. The session's next owner carries it out, or the controller does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from session_book import make_chain
from store_turns import SESSION, append_turn, commit_turn, turn_of

from controllers.cluster import Cluster
from controllers.errors import SessionClosing, SessionNotFound, StaleEpoch
from controllers.records import Assignment, ReplicaStatus, SessionRecord, SessionStatus
from controllers.retention import CLOSING_TIMEOUT_S
from controllers.session import SessionController
from controllers.session_log.redis_store import RedisSessionStore
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.settings import ClusterSettings
from controllers.turns import Replay, Turn
from tests.unit.controllers.reporting import HeldSessions

TIMEOUT_S = 1000.0
SILENCE_S = 10.0

Place = Callable[[], SessionStore]


@pytest.fixture
def book(clock: ManualClock) -> SessionController:
    """The session book of the next owner, which has the session from the log."""
    book = SessionController(clock, TIMEOUT_S, make_chain=make_chain)
    book.adopt(SessionRecord("s", "", 2, "b", closes_after="k"))
    return book


def begun(book: SessionController, key: str | None) -> Turn:
    turn = book.begin_turn("s", 2, idempotency_key=key)
    assert isinstance(turn, Turn)
    return turn


def test_the_next_owner_takes_the_turn_that_the_close_waits_for_and_no_other(book: SessionController) -> None:
    for other in ("other", None):
        with pytest.raises(SessionClosing):
            book.begin_turn("s", 2, idempotency_key=other)
    with pytest.raises(SessionClosing):
        book.begin_fork("s", 2, 0)
    turn = begun(book, "k")
    assert not book.is_closed("s")
    book.commit_turn(turn, book.prepare_commit(turn, [1], [2], b"r"))
    assert book.is_closed("s")
    assert isinstance(book.begin_turn("s", 2, idempotency_key="k"), Replay)


def test_the_turn_may_come_again_though_it_could_not_begin(book: SessionController) -> None:
    book.abort_turn(begun(book, "k"))
    assert not book.is_closed("s")
    begun(book, "k")


def test_it_is_closed_once_the_turn_has_had_its_time(book: SessionController, clock: ManualClock) -> None:
    turn = begun(book, "k")
    clock.advance(CLOSING_TIMEOUT_S * 2)
    assert book.expired() == []
    book.abort_turn(turn)
    clock.advance(CLOSING_TIMEOUT_S)
    assert book.expired() == []
    clock.advance(0.1)
    assert book.expired() == ["s"]


def test_a_second_close_waits_for_the_same_turn(book: SessionController) -> None:
    assert book.close("s") == "k"
    begun(book, "k")


def test_one_that_waits_for_nothing_that_could_come_is_closed_at_once(clock: ManualClock) -> None:
    book = SessionController(clock, TIMEOUT_S, make_chain=make_chain)
    book.adopt(SessionRecord("s", "", 2, "b", closes_after=""))
    assert book.is_closed("s")
    assert book.expired() == ["s"]
    assert book.close("s") is None


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Place:
    if request.param == "sqlite":
        return lambda: SqliteSessionStore(tmp_path / "sessions.db", clock=clock)
    server: RedisServer = request.getfixturevalue("redis_server")
    log = server.log()
    return lambda: RedisSessionStore(log, CLUSTER, clock=clock)


class World:
    """A cluster of "a" and "b" with a session "s", whose owner is `opened`. Its log outlives restarts."""

    def __init__(self, place: Place, clock: ManualClock) -> None:
        self._place = place
        self._clock = clock
        self._held = HeldSessions()
        self.store = place()
        self.cluster = self._build()
        self.opened = self._open()

    def restart(self) -> None:
        self.store.disconnect()
        self.store = self._place()
        self.cluster = self._build()

    def report(self, owner: Assignment, **changes: object) -> None:
        held = SessionStatus("s", owner.epoch, 0, 0, 0.0, True)
        self.beat(owner.replica_id, replace(held, **changes))

    def beat(self, replica_id: str, *held: SessionStatus) -> None:
        self._held.beat(self.cluster, ReplicaStatus(replica_id, 1000, 1000), *held)

    def wait(self, seconds: float, owner: Assignment | None = None) -> list[str]:
        """Lets time pass. Returns the sessions that end meanwhile. `owner` keeps reporting that the session has a
        turn."""
        ended = []
        for _ in range(int(seconds)):
            self._clock.advance(1.0)
            for replica_id in "ab":
                self.beat(replica_id)
            if owner is not None:
                self.report(owner, closing=True)
            ended += self.cluster.expire_idle()
        return ended

    def _build(self) -> Cluster:
        settings = ClusterSettings(replica_timeout_s=SILENCE_S, session_timeout_s=TIMEOUT_S)
        return Cluster(settings, self.store, self._clock, self._clock)

    def _open(self) -> Assignment:
        for replica_id in "ab":
            self.cluster.register_replica(ReplicaStatus(replica_id, 1000, 1000))
        return self.cluster.open_session("s", "", None, None)


@pytest.fixture
def world(place: Place, clock: ManualClock) -> Iterator[World]:
    world = World(place, clock)
    yield world
    world.store.disconnect()


def closing(world: World) -> Assignment:
    """Lets the session's owner accept a close during a turn. Returns the owner."""
    world.report(world.opened)
    world.cluster.close_after("s", world.opened.epoch, "k")
    return world.opened


def test_the_next_owner_is_told(world: World) -> None:
    """The session used to go on as if nobody had closed it, until its idle timeout and for any turn."""
    former = closing(world)
    world.cluster.report_unreachable(former.replica_id, True)
    owner = world.cluster.resolve("s", False, "")
    assert owner.epoch == former.epoch + 1
    assert world.cluster.load_session("s", owner.epoch, owner.replica_id).closes_after == "k"


def test_it_ends_though_its_owner_has_died_and_nobody_comes(world: World) -> None:
    former = closing(world)
    assert world.wait(CLOSING_TIMEOUT_S * 3, former) == [], "its turn is under way"
    world.cluster.report_unreachable(former.replica_id, True)
    assert world.wait(CLOSING_TIMEOUT_S - 1) == []
    assert world.wait(2) == ["s"]
    assert list(world.store.load_all_entries()) == []


def test_it_ends_though_owner_and_controller_have_died(world: World) -> None:
    closing(world)
    world.restart()
    assert world.wait(CLOSING_TIMEOUT_S - 1) == []
    assert world.wait(2) == ["s"]


def test_the_turn_that_it_waits_for_is_committed_all_the_same(world: World) -> None:
    owner = closing(world)
    commit_turn(world.cluster, turn_of(0, 0, [1, 2], epoch=owner.epoch))
    assert world.store.load("s").closes_after == "k"
    assert world.cluster.close_session("s", None, owner.epoch)


def test_it_stays_where_its_turn_is(world: World) -> None:
    """The owner drains and offers the session."""
    owner = closing(world)
    world.cluster.drain_replica(owner.replica_id)
    assert not world.cluster.offer_session("s", owner.epoch, owner.replica_id)


def test_only_the_owner_says_so(world: World) -> None:
    with pytest.raises(StaleEpoch):
        world.cluster.close_after("s", world.opened.epoch + 1, "k")
    assert world.store.load("s").closes_after is None
    world.cluster.close_session("s")
    with pytest.raises(SessionNotFound):
        world.cluster.close_after("s", world.opened.epoch, "k")


def test_a_log_keeps_it_and_gives_it_to_no_fork(place: Place) -> None:
    store = place()
    opened = store.open(SESSION)
    assert store.find("s").closes_after is None
    for _ in range(2):
        store.close_after("s", "k")
    append_turn(store, turn_of(0, 0, [1, 2, 3], epoch=opened.epoch))
    store.assign("s", "b", opened.epoch + 1)
    child = store.fork("s", 2, replace(SESSION, session_id="child"))
    assert child.closes_after is None
    assert (store.load("s").closes_after, store.load("child").closes_after) == ("k", None)
    store.disconnect()
    again = place()
    assert {entry.session_id: entry.closes_after for entry in list(again.load_all_entries())} == {
        "s": "k",
        "child": None,
    }
    with pytest.raises(SessionNotFound):
        again.close_after("unknown", "k")
    again.disconnect()


def test_an_open_session_in_redis_is_read_by_versions_that_know_no_such_closes(
    redis_server: RedisServer,
) -> None:
    log = redis_server.log()
    store = RedisSessionStore(log, CLUSTER)
    store.open(SESSION)
    with redis_server.client() as client:
        assert b"closes_after" not in client.get(f"kedge:{{{log.name}}}:session:s")
        store.close_after("s", "k")
        assert b"closes_after" in client.get(f"kedge:{{{log.name}}}:session:s")
    store.disconnect()
