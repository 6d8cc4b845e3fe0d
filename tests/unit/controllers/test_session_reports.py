"""How the ledger hears what replicas hold: only changes, whatever happens to the channel and the controller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_clock import ManualClock
from session_book import make_chain
from store_turns import commit_turn

from controllers import session_reports
from controllers.cluster import Cluster
from controllers.errors import NoReplica
from controllers.ownership import OwnershipLedger
from controllers.records import (
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionReport,
    SessionStatus,
)
from controllers.session import SessionController
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_reports import ReportWriter
from controllers.settings import ClusterSettings
from controllers.turns import Turn

IDLE_S = 50.0
SILENCE_S = 10.0
PART = 3
"""How many sessions a report has in these tests."""


@pytest.fixture(autouse=True)
def _short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reports, "MOST_IN_REPORT", PART)


class Replica:
    """A session book and its reports, without an engine."""

    def __init__(self, replica_id: str, clock: ManualClock) -> None:
        self.status = ReplicaStatus(replica_id, 1000, 1000)
        self.book = SessionController(clock, IDLE_S, make_chain=make_chain)
        self.writer = ReportWriter()

    def hold(self, *names: str, epoch: int = 1) -> None:
        for name in names:
            self.book.adopt(SessionRecord(name, "", epoch, self.status.replica_id))

    def report(self) -> SessionReport:
        self.writer.note(self.book.take_changed())
        return self.writer.next(self.book.status, self.book.held)

    def heard(self, report: SessionReport, reply: HeartbeatReply) -> None:
        self.writer.answered(report, reply)
        for name, epoch in zip(reply.stale_sessions, reply.stale_epochs, strict=True):
            status = self.book.status(name)
            if status is not None and status.epoch == epoch and not status.in_turn:
                self.book.drop(name)

    def beat(self, cluster: Cluster) -> list[SessionReport]:
        """Sends reports until everything is told, as a heartbeat does. Returns the reports."""
        reports = [self.report()]
        while True:
            reply = cluster.heartbeat(self.status, reports[-1])
            if not reply.known:
                cluster.register_replica(self.status)
            self.heard(reports[-1], reply)
            if not self.writer.has_more:
                return reports
            reports.append(self.report())


@pytest.fixture
def store(clock: ManualClock) -> Iterator[SqliteSessionStore]:
    store = SqliteSessionStore(":memory:", clock=clock)
    yield store
    store.disconnect()


@dataclass
class World:
    clock: ManualClock
    store: SqliteSessionStore
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self.restart()
        self.a, self.b = Replica("a", self.clock), Replica("b", self.clock)
        self.cluster.register_replica(self.a.status)

    def restart(self) -> None:
        config = ClusterSettings(replica_timeout_s=SILENCE_S, session_timeout_s=IDLE_S)
        self.cluster = Cluster(config, self.store, self.clock, self.clock)

    def open(self, *names: str) -> None:
        """Opens these sessions at replica a, which then holds them."""
        for name in names:
            assert self.cluster.open_session(name, "", None, None).replica_id == "a"
        self.a.hold(*names)

    def told(self) -> dict[str, bool]:
        """Whether each session is in a turn. Only sessions that their owner has reported are included."""
        return {
            each.session_id: each.in_turn for each in self.cluster.sessions() if each.reported_s is not None
        }


@pytest.fixture
def world(clock: ManualClock, store: SqliteSessionStore) -> World:
    return World(clock, store)


@pytest.mark.parametrize("held", [10, 1000])
def test_a_heartbeat_costs_what_has_changed(world: World, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    """Each replica used to report every session each second. 100,000 of them took most of the controller's time."""
    names = [f"s{number}" for number in range(held)]
    world.open(*names)
    world.a.beat(world.cluster)
    noted: list[str] = []
    report = OwnershipLedger.report

    def counted(self: OwnershipLedger, replica_id: str, update: SessionStatus) -> bool:
        noted.append(update.session_id)
        return report(self, replica_id, update)

    monkeypatch.setattr(OwnershipLedger, "report", counted)
    monkeypatch.setattr(OwnershipLedger, "page", None)
    for _ in range(20):
        world.clock.advance(1.0)
        (quiet,) = world.a.beat(world.cluster)
        assert (quiet.changed, quiet.dropped) == ((), ())
    turn = world.a.book.begin_turn("s3", 1)
    world.a.beat(world.cluster)
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    world.a.book.drop("s4")
    world.a.beat(world.cluster)
    assert noted == ["s3", "s3"]


def test_everything_comes_in_parts(world: World) -> None:
    world.open(*(f"s{number}" for number in range(2 * PART + 1)))
    reports = world.a.beat(world.cluster)
    assert [len(report.changed) for report in reports] == [PART, PART, 1]
    assert [report.since for report in reports] == [0, 1, 2]
    assert len(world.told()) == 2 * PART + 1


def test_an_idle_sessions_last_use_is_told_once(world: World) -> None:
    """The ledger runs the idle clock by itself."""
    world.open("s")
    world.a.beat(world.cluster)
    turn = world.a.book.begin_turn("s", 1)
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    used_s = world.clock()
    world.clock.advance(3.0)
    world.a.beat(world.cluster)
    assert world.cluster.session("s").last_used_s == used_s
    for _ in range(10):
        world.clock.advance(1.0)
        world.a.beat(world.cluster)
    assert world.cluster.session("s").last_used_s == used_s


def test_a_lost_report_is_made_good_by_the_next(world: World) -> None:
    world.open("s", "t")
    world.a.beat(world.cluster)
    turn = world.a.book.begin_turn("s", 1)
    world.a.report()  # the report never arrives
    world.a.book.drop("t")
    lost = world.a.report()  # the answer never arrives
    world.cluster.heartbeat(world.a.status, lost)
    assert world.told() == {"s": True}
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    world.a.beat(world.cluster)
    assert world.told() == {"s": False}


def test_a_report_that_comes_late_or_twice_changes_nothing(world: World) -> None:
    world.open("s")
    world.a.beat(world.cluster)
    turn = world.a.book.begin_turn("s", 1)
    late = world.a.report()
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    world.a.beat(world.cluster)
    for _ in range(2):
        reply = world.cluster.heartbeat(world.a.status, late)
        assert not reply.wants_all
        assert world.told() == {"s": False}


@pytest.mark.parametrize("order", ["report first", "commit first"])
def test_a_turn_that_is_committed_is_not_in_flight(world: World, order: str) -> None:
    """Reports are up to a second old. Who went on from a response at once was told that its session had a turn."""
    world.open("s")
    world.a.beat(world.cluster)
    turn = world.a.book.begin_turn("s", 1)
    assert isinstance(turn, Turn)
    report = world.a.report()
    record = world.a.book.prepare_commit(turn, [1, 2], [3], b"")
    if order == "report first":
        world.cluster.heartbeat(world.a.status, report)
        assert world.told() == {"s": True}
    commit_turn(world.cluster, record)
    if order == "commit first":
        world.cluster.heartbeat(world.a.status, report)
        assert world.cluster.session("s").used_since_report, "the report's size is that of before the turn"
    assert world.told() == {"s": False}
    world.a.book.commit_turn(turn, record)
    world.a.book.begin_turn("s", 1)
    world.a.beat(world.cluster)
    assert world.told() == {"s": True}


def test_an_answer_confirms_only_what_its_report_had(world: World) -> None:
    """The session has changed again since. The report with that change is lost."""
    world.open("s")
    world.a.beat(world.cluster)
    turn = world.a.book.begin_turn("s", 1)
    first = world.a.report()
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    world.a.report()
    world.a.heard(first, world.cluster.heartbeat(world.a.status, first))
    world.a.beat(world.cluster)
    assert world.told() == {"s": False}


def test_a_controller_that_has_just_started_asks_for_everything(world: World) -> None:
    names = [f"s{number}" for number in range(PART + 1)]
    world.open(*names)
    world.a.beat(world.cluster)
    world.restart()
    assert world.told() == {}
    reports = world.a.beat(world.cluster)
    assert [len(report.changed) for report in reports] == [0, PART, 1]
    assert world.told().keys() == set(names)
    assert world.a.beat(world.cluster)[0].changed == ()


def test_who_was_taken_for_gone_tells_everything_again(world: World) -> None:
    """One of its sessions has moved meanwhile. The replica hears which one, and drops no other."""
    world.open("s", "t")
    world.a.beat(world.cluster)
    world.clock.advance(SILENCE_S + 1)
    world.cluster.register_replica(world.b.status)
    assert world.cluster.resolve("s", False, "").replica_id == "b"
    world.a.beat(world.cluster)
    world.a.beat(world.cluster)
    assert world.a.book.held() == ["t"]
    assert world.told() == {"t": False}


def test_of_what_it_owns_no_more_a_replica_hears_until_it_has_dropped_it(world: World) -> None:
    world.open("s", "t", "u")
    turn = world.a.book.begin_turn("u", 1)
    world.a.beat(world.cluster)
    world.cluster.register_replica(world.b.status)
    world.cluster.close_session("s")
    world.cluster.report_unreachable("a", True)
    moved = world.cluster.resolve("u", False, "")
    world.cluster.register_replica(world.a.status)
    world.a.beat(world.cluster)
    reply = world.cluster.heartbeat(world.a.status, world.a.report())
    assert dict(zip(reply.stale_sessions, reply.stale_epochs, strict=True)) == {"u": 1}
    assert isinstance(turn, Turn)
    world.a.book.abort_turn(turn)
    for _ in range(3):
        world.a.beat(world.cluster)
    assert world.a.book.held() == ["t"]
    assert world.cluster.heartbeat(world.a.status, world.a.report()).stale_sessions == ()
    assert (moved.replica_id, moved.epoch) == ("b", 2)


def test_a_session_that_came_back_is_not_dropped_for_what_it_was(world: World) -> None:
    """A replica held the session at epoch 1 and owns it again. What it holds is stale, but what it is about to load is
    not."""
    world.open("s")
    world.a.beat(world.cluster)
    world.cluster.register_replica(world.b.status)
    world.cluster._move_to(world.cluster.session("s"), "b")
    world.cluster._move_to(world.cluster.session("s"), "a")
    report = world.a.report()
    reply = world.cluster.heartbeat(world.a.status, report)
    assert (reply.stale_sessions, reply.stale_epochs) == (("s",), (1,))
    world.a.hold("s", epoch=3)
    world.a.heard(report, reply)
    assert world.a.book.epoch("s") == 3
    world.a.beat(world.cluster)
    assert world.told() == {"s": False}
    assert world.cluster.heartbeat(world.a.status, world.a.report()).stale_sessions == ()


def test_nothing_is_kept_of_a_replica_that_is_gone(world: World) -> None:
    world.open("s", "t")
    world.a.beat(world.cluster)
    world.cluster.close_session("s")
    world.clock.advance(SILENCE_S + 1)
    world.cluster.expire_idle()
    world.cluster.close_session("t")
    assert world.cluster._ledger._by_replica == {}
    assert world.cluster._reports.replicas() == []


def test_a_session_whose_owner_was_lost_in_its_turn_has_its_whole_timeout(world: World) -> None:
    """The replica reported the turn when it began, longer ago than the timeout."""
    world.open("s")
    turn = world.a.book.begin_turn("s", 1)
    assert isinstance(turn, Turn)
    for _ in range(2 * int(IDLE_S)):
        world.clock.advance(1.0)
        world.a.beat(world.cluster)
        assert world.cluster.expire_idle() == []
    world.cluster.report_unreachable("a", True)
    world.clock.advance(IDLE_S)
    assert world.cluster.expire_idle() == []
    world.clock.advance(0.1)
    assert world.cluster.expire_idle() == ["s"]


class LossyChannel(RuleBasedStateMachine):
    """Heartbeats of two replicas over a channel that loses, repeats and delays reports and answers. The controller
    restarts, moves and closes sessions, and takes replicas for gone."""

    def __init__(self) -> None:
        super().__init__()
        self.most_in_report = session_reports.MOST_IN_REPORT
        session_reports.MOST_IN_REPORT = PART
        self.world = World(ManualClock(), SqliteSessionStore(":memory:"))
        self.world.cluster.register_replica(self.world.b.status)
        self.replicas = {"a": self.world.a, "b": self.world.b}
        self.asked: list[tuple[Replica, SessionReport]] = []
        self.answers: list[tuple[Replica, SessionReport, HeartbeatReply]] = []
        self.turns: list[tuple[Replica, Turn]] = []

    def teardown(self) -> None:
        session_reports.MOST_IN_REPORT = self.most_in_report
        self.world.store.disconnect()

    @initialize()
    def begin(self) -> None:
        self.open("stuvwxyz")

    @rule(names=st.text("stuvwxyz", max_size=5))
    def open(self, names: str) -> None:
        for name in names:
            try:
                owner = self.world.cluster.resolve(name, True, "")
            except NoReplica:
                return
            status = self.replicas[owner.replica_id].book.status(name)
            if status is None or (status.epoch < owner.epoch and not status.in_turn):
                self.replicas[owner.replica_id].hold(name, epoch=owner.epoch)

    @rule(which=st.sampled_from("ab"), name=st.sampled_from("stuvwxyz"))
    def turn(self, which: str, name: str) -> None:
        book = self.replicas[which].book
        status = book.status(name)
        if status is not None and not status.in_turn:
            turn = book.begin_turn(name, status.epoch)
            assert isinstance(turn, Turn)
            self.turns.append((self.replicas[which], turn))

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        replica, turn = self.turns.pop(data.draw(st.integers(0, len(self.turns) - 1)))
        replica.book.abort_turn(turn)

    @rule(which=st.sampled_from("ab"), name=st.sampled_from("stuvwxyz"))
    def drop(self, which: str, name: str) -> None:
        book = self.replicas[which].book
        status = book.status(name)
        if status is not None and not status.in_turn:
            book.drop(name)

    @rule(name=st.sampled_from("stuvwxyz"))
    def close(self, name: str) -> None:
        self.world.cluster.close_session(name)

    @rule(name=st.sampled_from("stuvwxyz"), to=st.sampled_from("ab"))
    def move(self, name: str, to: str) -> None:
        if name in self.world.cluster._ledger:
            self.world.cluster._move_to(self.world.cluster.session(name), to)

    @rule(which=st.sampled_from("ab"))
    def takes_for_gone(self, which: str) -> None:
        self.world.cluster.report_unreachable(which, True)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(which=st.sampled_from("ab"))
    def sends(self, which: str) -> None:
        replica = self.replicas[which]
        self.asked.append((replica, replica.report()))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), fate=st.sampled_from(["answered", "answered", "answer lost", "repeated", "lost"]))
    def arrives(self, data: st.DataObject, fate: str) -> None:
        replica, report = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        if fate == "lost":
            return
        reply = self.world.cluster.heartbeat(replica.status, report)
        if not reply.known:
            self.world.cluster.register_replica(replica.status)
        if fate == "repeated":
            self.asked.append((replica, report))
        if fate != "answer lost":
            self.answers.append((replica, report, reply))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer_arrives(self, data: st.DataObject) -> None:
        replica, report, reply = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        for name, epoch in zip(reply.stale_sessions, reply.stale_epochs, strict=True):
            status = replica.book.status(name)
            if status is not None and status.epoch == epoch:
                current = self.entry(name)
                assert current is None or (current.replica_id, current.epoch) != (
                    replica.status.replica_id,
                    epoch,
                ), "told to drop what it owns"
                if not status.in_turn:
                    replica.book.drop(name)
        replica.writer.answered(report, reply)

    def entry(self, name: str) -> LedgerEntry | None:
        return self.world.cluster.session(name) if name in self.world.cluster._ledger else None

    @rule()
    def comes_to_rest(self) -> None:
        """After a few heartbeats without trouble everything is known, even if old reports arrive then."""
        for replica, turn in self.turns:
            replica.book.abort_turn(turn)
        self.turns.clear()
        for _ in range(3):
            for replica in self.replicas.values():
                replica.beat(self.world.cluster)
        for replica, report in self.asked:
            self.world.cluster.heartbeat(replica.status, report)
        self.asked.clear()
        for replica in self.replicas.values():
            for name in replica.book.held():
                status, entry = replica.book.status(name), self.entry(name)
                assert status is not None
                assert entry is not None
                assert (entry.replica_id, entry.epoch) == (replica.status.replica_id, status.epoch)
                assert entry.reported_s is not None
            assert self.world.cluster._ledger.use_of_replica(replica.status.replica_id).stale == {}
        for entry in self.world.cluster.sessions():
            held = self.replicas[entry.replica_id].book.epoch(entry.session_id) == entry.epoch
            assert held == (entry.reported_s is not None)
            assert not entry.in_turn

    @invariant()
    def counts_add_up(self) -> None:
        ledger = self.world.cluster._ledger
        for replica_id in "ab":
            own = [entry for entry in ledger.page() if entry.replica_id == replica_id]
            assert ledger.count_of(replica_id) == len(own)
            assert ledger.use_of_replica(replica_id).in_turn == sum(entry.in_turn for entry in own)


LossyChannel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, print_blob=True
)
TestReportsOverALossyChannel = LossyChannel.TestCase
