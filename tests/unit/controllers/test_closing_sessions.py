"""The log records that a close waits for a turn. The session's next owner carries it out, or the controller does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cluster_world import World, open_session
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from session_book import make_chain
from session_logs import opened_log
from store_turns import SESSION, append_turn, commit_turn, turn_of

from controllers.errors import SessionClosing, SessionNotFound, StaleEpoch
from controllers.records import Assignment, SessionRecord, SessionStatus
from controllers.retention import CLOSING_TIMEOUT_S
from controllers.session import SessionController
from controllers.session_log.redis_store import RedisSessionStore
from controllers.settings import LogSettings
from controllers.turns import Replay, Turn

TIMEOUT_S = 1000.0


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


@pytest.fixture
def world(log: LogSettings, clock: ManualClock) -> Iterator[World]:
    """A cluster of "a" and "b", whose log is of either kind."""
    world = World(log, clock)
    world.beat("a", "b")
    yield world
    world.store.disconnect()


def report(world: World, owner: Assignment, **changes: object) -> None:
    """The owner reports that the session has a turn."""
    held = replace(SessionStatus("s", owner.epoch, 0, 0, 0.0, True), **changes)
    world.report(owner.replica_id, held)


def wait(world: World, seconds: float, owner: Assignment | None = None) -> list[str]:
    """Lets time pass. Returns the sessions that end meanwhile. `owner` keeps reporting that the session has a turn."""
    ended = []
    for _ in range(int(seconds)):
        world.clock.advance(1.0)
        world.beat("a", "b")
        if owner is not None:
            report(world, owner, closing=True)
        ended += world.cluster.expire_idle()
    return ended


def closing(world: World) -> Assignment:
    """Opens the session, and lets its owner accept a close during a turn. Returns the owner."""
    opened = open_session(world)
    report(world, opened)
    world.cluster.close_after("s", opened.epoch, "k")
    return opened


def test_the_next_owner_is_told(world: World) -> None:
    """The session used to go on as if nobody had closed it, until its idle timeout and for any turn."""
    former = closing(world)
    world.cluster.report_unreachable(former.replica_id, True)
    owner = world.cluster.resolve("s", False, "")
    assert owner.epoch == former.epoch + 1
    assert world.cluster.load_session("s", owner.epoch, owner.replica_id).closes_after == "k"


def test_it_ends_though_its_owner_has_died_and_nobody_comes(world: World) -> None:
    former = closing(world)
    assert wait(world, CLOSING_TIMEOUT_S * 3, former) == [], "its turn is under way"
    world.cluster.report_unreachable(former.replica_id, True)
    assert wait(world, CLOSING_TIMEOUT_S - 1) == []
    assert wait(world, 2) == ["s"]
    assert list(world.store.load_all_entries()) == []


def test_it_ends_though_owner_and_controller_have_died(world: World) -> None:
    closing(world)
    world.restart()
    assert wait(world, CLOSING_TIMEOUT_S - 1) == []
    assert wait(world, 2) == ["s"]


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
    opened = open_session(world)
    with pytest.raises(StaleEpoch):
        world.cluster.close_after("s", opened.epoch + 1, "k")
    assert world.store.load("s").closes_after is None
    world.cluster.close_session("s")
    with pytest.raises(SessionNotFound):
        world.cluster.close_after("s", opened.epoch, "k")


def test_a_log_keeps_it_and_gives_it_to_no_fork(log: LogSettings) -> None:
    store = opened_log(log)
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
    again = opened_log(log)
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
