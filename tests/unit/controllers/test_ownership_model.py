"""Replicas, a controller and an unreliable world against a model: one owner at a time, no turn lost or half done.

Replicas crash or are wrongly reported lost, sessions leave a crowded replica, front ends remember former owners, the
controller restarts or pauses, routers drop replicas, and replies get lost. In all cases, a committed turn has seen the
whole history that was committed before it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_clock import ManualClock
from session_book import make_chain
from store_turns import commit_turn

from controllers.cluster import Cluster
from controllers.errors import NoReplica, SessionExists, SessionNotFound, StaleEpoch, TurnInFlight
from controllers.records import Assignment, ForkOrder, HeartbeatReply, ReplicaStatus
from controllers.session import SessionController
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_reports import ReportWriter
from controllers.settings import ClusterSettings, RebalancingSettings
from controllers.tokens import unpack_tokens
from controllers.turns import Replay, Turn
from tests.unit.controllers.reporting import heartbeat

IDLE_S = 50.0
SILENCE_S = 10.0
REPLICAS = st.integers(0, 2)
SESSIONS = st.sampled_from(["s", "t"])
RARELY = st.sampled_from([False] * 4 + [True])
TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=3)


@dataclass
class Replica:
    replica_id: str
    sessions: SessionController
    turns: list[Turn] = field(default_factory=list)
    writer: ReportWriter = field(default_factory=ReportWriter)
    crowded: bool = False
    draining: bool = False

    def status(self, draining: bool = False, running: int = 0) -> ReplicaStatus:
        return ReplicaStatus(self.replica_id, 1000, 1000, draining=draining, running=running)

    def beat(self, cluster: Cluster, running: int) -> HeartbeatReply:
        """A heartbeat with what has changed."""
        self.writer.note(self.sessions.take_changed())
        status, book = self.status(running=running), self.sessions
        return heartbeat(cluster, status, self.writer, book.status, book.held)


class OwnershipMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.store = SqliteSessionStore(self.folder / "sessions.db", clock=self.clock)
        self.started = 0
        self.histories: dict[str, list[int]] = {}
        self.remembered: dict[str, Assignment] = {}

    @initialize()
    def start(self) -> None:
        self.fork_numbers = itertools.count()
        self.cluster = self._cluster()
        self.replicas = [self._new_replica() for _ in range(3)]

    def _cluster(self) -> Cluster:
        config = ClusterSettings(
            replica_timeout_s=SILENCE_S,
            session_timeout_s=IDLE_S,
            rebalancing=RebalancingSettings(min_gap=2.0),
        )
        return Cluster(config, self.store, self.clock, self.clock)

    def _new_replica(self) -> Replica:
        self.started += 1
        replica = Replica(f"r{self.started}", SessionController(self.clock, IDLE_S, make_chain=make_chain))
        self.cluster.register_replica(replica.status())
        return replica

    def _owner(self, assignment: Assignment) -> Replica | None:
        return next((r for r in self.replicas if r.replica_id == assignment.replica_id), None)

    @rule(session_id=SESSIONS, remembers=st.booleans(), keep=st.none() | st.floats(0, 1))
    def begin(self, session_id: str, remembers: bool, keep: float | None) -> None:
        """A front end sends a turn to the owner that it remembers, which may no longer be the owner.

        Session ids are used again. Remains of a closed session must not get into the next session of that name.
        """
        try:
            if not remembers or session_id not in self.remembered:
                self.remembered[session_id] = self.cluster.resolve(session_id, True, "")
                self.histories.setdefault(session_id, [])
            owner = self.remembered[session_id]
            replica = self._owner(owner)
            if replica is None:
                self.cluster.report_unreachable(owner.replica_id, True)
                return
            if not replica.sessions.knows(session_id, owner.epoch):
                replica.sessions.adopt(self.cluster.load_session(session_id, owner.epoch, owner.replica_id))
            length = replica.sessions.committed_len(session_id)
            rewind_to = None if keep is None else int(length * keep)
            turn = replica.sessions.begin_turn(session_id, owner.epoch, rewind_to=rewind_to)
        except SessionNotFound:
            assert session_id not in self.histories
        except (StaleEpoch, TurnInFlight, NoReplica):
            pass
        else:
            assert not isinstance(turn, Replay)
            if (replica.crowded or replica.draining) and self._offered(turn, replica):
                return
            replica.turns.append(turn)

    def _offered(self, turn: Turn, replica: Replica) -> bool:
        """Offers the session. Returns True if it now belongs to another replica, which ends the turn here."""
        try:
            moved = self.cluster.offer_session(turn.session_id, turn.epoch, replica.replica_id)
        except SessionNotFound:
            return False  # the turn will not commit
        except StaleEpoch:
            moved = True
        if moved:
            replica.sessions.abort_turn(turn)
            replica.sessions.drop(turn.session_id)
        return moved

    @precondition(lambda self: any(replica.turns for replica in self.replicas))
    @rule(data=st.data(), tokens=TOKENS, crashes=RARELY)
    def commit(self, data: st.DataObject, tokens: list[int], crashes: bool) -> None:
        """The replica may crash just before the controller's answer reaches it."""
        which = data.draw(st.sampled_from([i for i, replica in enumerate(self.replicas) if replica.turns]))
        replica = self.replicas[which]
        turn = replica.turns.pop()
        record = replica.sessions.prepare_commit(turn, tokens, [], b"")
        try:
            commit_turn(self.cluster, record)
        except (StaleEpoch, SessionNotFound):
            replica.sessions.abort_turn(turn)
            replica.sessions.drop(turn.session_id)
            return
        history = self.histories[turn.session_id]
        assert list(turn.history) == history
        self.histories[turn.session_id] = history[: turn.history_len] + tokens
        if crashes:
            self.crash(which, noticed=False)
        else:
            replica.sessions.commit_turn(turn, record)

    @precondition(lambda self: any(replica.turns for replica in self.replicas))
    @rule(which=REPLICAS)
    def abort(self, which: int) -> None:
        replica = self.replicas[which]
        if replica.turns:
            replica.sessions.abort_turn(replica.turns.pop())

    @rule(
        parent_id=SESSIONS, keep=st.floats(0, 1), fate=st.sampled_from(["made", "made", "crash", "retried"])
    )
    def fork(self, parent_id: str, keep: float, fate: str) -> None:
        """Makes the other session a fork. The replica may crash after the log has the child."""
        child_id = "t" if parent_id == "s" else "s"
        replica = next((r for r in self.replicas if r.sessions.epoch(parent_id) is not None), None)
        if replica is None:
            return
        epoch = replica.sessions.epoch(parent_id)
        try:
            length = int(replica.sessions.committed_len(parent_id) * keep)
            fork = replica.sessions.begin_fork(parent_id, epoch, length)
        except TurnInFlight:
            return
        order = ForkOrder(child_id, f"key{next(self.fork_numbers)}", length)
        try:
            child = self.cluster.fork_session(parent_id, epoch, replica.replica_id, order)
        except (SessionExists, SessionNotFound, StaleEpoch):
            replica.sessions.abort_fork(fork)
            return
        assert list(fork.history) == self.histories[parent_id]
        self.histories[child_id] = list(fork.history[:length])
        if fate == "retried":
            assert self.cluster.fork_session(parent_id, epoch, replica.replica_id, order) == child
        if fate == "crash":
            self.crash(self.replicas.index(replica), noticed=True)
        else:
            replica.sessions.finish_fork(fork, child)

    @rule(which=REPLICAS, trouble=st.sampled_from(["none", "none", "crash", "noticed crash", "false alarm"]))
    def trouble(self, which: int, trouble: str) -> None:
        if trouble == "false alarm":
            self.cluster.report_unreachable(self.replicas[which].replica_id, True)
        elif trouble != "none":
            self.crash(which, noticed=trouble == "noticed crash")

    def crash(self, which: int, noticed: bool) -> None:
        lost = self.replicas[which]
        self.replicas[which] = self._new_replica()
        if noticed:
            self.cluster.report_unreachable(lost.replica_id, True)

    @rule(happens=RARELY)
    def restart_controller(self, happens: bool) -> None:
        if happens:
            self.cluster = self._cluster()

    @rule(which=REPLICAS, happens=RARELY)
    def drain_replica(self, which: int, happens: bool) -> None:
        if happens:
            with suppress(NoReplica):
                self.cluster.drain_replica(self.replicas[which].replica_id)

    @rule(
        advance_s=st.sampled_from([0.0, 1.0, 6.0, 30.0]),
        running=st.lists(st.sampled_from([0, 0, 9]), min_size=3, max_size=3),
    )
    def heartbeats(self, advance_s: float, running: list[int]) -> None:
        self.clock.advance(advance_s)
        self.cluster.tick()
        for which, replica in enumerate(self.replicas):
            reply = replica.beat(self.cluster, running[which])
            replica.crowded, replica.draining = reply.crowded, reply.draining
            for session_id in reply.stale_sessions:
                if all(turn.session_id != session_id for turn in replica.turns):
                    replica.sessions.drop(session_id)

    @rule()
    def expire(self) -> None:
        for replica in self.replicas:
            for session_id in replica.sessions.expired():
                epoch = replica.sessions.epoch(session_id)
                replica.sessions.drop(session_id)
                try:
                    if self.cluster.close_session(session_id, epoch=epoch):
                        del self.histories[session_id]
                except StaleEpoch:
                    pass
        in_turn = {turn.session_id for replica in self.replicas for turn in self._current_turns(replica)}
        for session_id in self.cluster.expire_idle():
            assert session_id not in in_turn
            del self.histories[session_id]

    def _current_turns(self, replica: Replica) -> list[Turn]:
        """The turns of this replica that can still commit. A replica that was silent has none."""
        epochs = {entry.session_id: entry.epoch for entry in self.cluster.sessions()}
        alive = any(status.replica_id == replica.replica_id for status in self.cluster.replicas())
        return [turn for turn in replica.turns if alive and epochs.get(turn.session_id) == turn.epoch]

    @rule(session_id=SESSIONS, happens=RARELY)
    def close(self, session_id: str, happens: bool) -> None:
        if not happens:
            return
        assert self.cluster.close_session(session_id) == (session_id in self.histories)
        self.histories.pop(session_id, None)

    @invariant()
    def log_and_ledger_equal_the_model(self) -> None:
        if not hasattr(self, "cluster"):
            return
        entries = {entry.session_id: entry for entry in self.cluster.sessions()}
        assert entries.keys() == self.histories.keys()
        for session_id, history in self.histories.items():
            assert unpack_tokens(self.store.load(session_id).history).tolist() == history
            assert entries[session_id].tokens == len(history)

    @invariant()
    def owners_hold_the_committed_history(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for entry in self.cluster.sessions():
            holders = [r for r in self.replicas if r.sessions.knows(entry.session_id, entry.epoch)]
            assert len(holders) <= 1
            for replica in holders:
                assert replica.replica_id == entry.replica_id
                assert replica.sessions.committed_len(entry.session_id) == entry.tokens

    def teardown(self) -> None:
        self.store.disconnect()
        shutil.rmtree(self.folder)


OwnershipMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, print_blob=True
)
TestOwnershipAgainstModel = OwnershipMachine.TestCase
