"""Two clusters on one Redis, in any order of steps: no turn is lost, doubled, or derived from another history than its
own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from manual_clock import ManualClock
from redis_server import RedisServer
from store_turns import commit_turn
from two_clusters import IDLE_S, Side, next_turn

from controllers.cluster import Cluster
from controllers.errors import ControllerError, SessionExists, SessionNotFound, StaleEpoch
from controllers.records import Assignment, ForkOrder, SessionRecord, TurnRecord
from controllers.tokens import unpack_tokens

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    phases=(Phase.reuse, Phase.generate),
)
SIDES = st.sampled_from([0, 1])
IDS = st.sampled_from(["s", "t", "u"])


@dataclass
class Session:
    """What the clients know of an open session. `epoch` is the highest that any of them was given."""

    epoch: int
    history: list[int] = field(default_factory=list)
    turns: int = 0


@dataclass(frozen=True)
class InFlight:
    """A turn that has begun at a replica."""

    side: int
    owner: Assignment
    held: SessionRecord


class ClustersMachine(RuleBasedStateMachine):
    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        log_name = uuid.uuid4().hex
        self.sides = [Side(name, self.server, log_name, self.clock) for name in ("old", "new")]
        self.sessions: dict[str, Session] = {}
        self.former_epoch = 0
        self.in_flight: list[InFlight] = []
        self.done: list[tuple[int, TurnRecord]] = []
        self.tokens = 0

    @rule(side=SIDES, session_id=IDS)
    def open(self, side: int, session_id: str) -> None:
        opening = lambda: self.sides[side].cluster.open_session(session_id, "", None, None)  # noqa: E731
        if session_id in self.sessions:
            self.refused(SessionExists, opening)
        else:
            self.add(opening(), [])

    @rule(side=SIDES, session_id=IDS)
    def begin(self, side: int, session_id: str) -> None:
        if session_id not in self.sessions:
            self.refused(SessionNotFound, lambda: self.sides[side].begin(session_id))
            return
        owner, held = self.sides[side].begin(session_id)
        session = self.sessions[session_id]
        assert owner.epoch >= session.epoch
        session.epoch = owner.epoch
        assert (unpack_tokens(held.history).tolist(), held.turns) == (session.history, session.turns)
        self.in_flight.append(InFlight(side, owner, held))

    @rule(index=st.integers(0, 3))
    def commit(self, index: int) -> None:
        """Commits a turn that may have begun long ago, at a cluster that may no longer be the owner."""
        if index >= len(self.in_flight):
            return
        turn = self.in_flight.pop(index)
        self.tokens += 1
        record = next_turn(turn.owner, turn.held, [self.tokens])
        session = self.sessions.get(record.session_id)
        if session is None or (session.epoch, session.turns) != (record.epoch, record.turn_index):
            self.refused((StaleEpoch, SessionNotFound), lambda: commit_turn(self.cluster(turn.side), record))
            return
        commit_turn(self.cluster(turn.side), record)
        session.history = [*unpack_tokens(turn.held.history).tolist(), self.tokens]
        session.turns += 1
        self.done.append((turn.side, record))

    @rule()
    def repeat_a_commit(self) -> None:
        """Repeats a commit whose answer was lost. Whatever the answer is now, the log has the turn once."""
        if not self.done:
            return
        side, record = self.done[-1]
        session = self.sessions.get(record.session_id)
        last = session is not None and (session.epoch, session.turns) == (record.epoch, record.turn_index + 1)
        if last:
            commit_turn(self.cluster(side), record)
        else:
            self.refused((StaleEpoch, SessionNotFound), lambda: commit_turn(self.cluster(side), record))

    @rule(side=SIDES, session_id=IDS, child_id=IDS)
    def fork(self, side: int, session_id: str, child_id: str) -> None:
        if session_id not in self.sessions:
            return
        owner, _ = self.sides[side].begin(session_id)
        self.sessions[session_id].epoch = owner.epoch
        forking = lambda: self.cluster(side).fork_session(  # noqa: E731
            session_id, owner.epoch, owner.replica_id, ForkOrder(child_id, uuid.uuid4().hex)
        )
        if child_id in self.sessions:
            self.refused(SessionExists, forking)
        else:
            child = forking()
            self.add(
                Assignment(child_id, child.replica_id, child.epoch, True), self.sessions[session_id].history
            )

    @rule(side=SIDES, session_id=IDS)
    def close(self, side: int, session_id: str) -> None:
        assert self.cluster(side).close_session(session_id, "") == (session_id in self.sessions)
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.former_epoch = max(self.former_epoch, session.epoch)

    @rule(side=SIDES, session_id=IDS)
    def lose_its_owner(self, side: int, session_id: str) -> None:
        entries = {entry.session_id: entry for entry in self.cluster(side).sessions()}
        if session_id in entries:
            self.cluster(side).report_unreachable(entries[session_id].replica_id, True)
            self.sides[side].beat()

    @rule(side=SIDES)
    def restart(self, side: int) -> None:
        self.sides[side].restart()

    @rule(side=SIDES)
    def sweep(self, side: int) -> None:
        assert self.cluster(side).expire_idle() == []

    @rule(seconds=st.sampled_from([1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(min(seconds, IDLE_S / 100))
        for side in self.sides:
            side.beat()

    @invariant()
    def the_log_is_what_clients_know(self) -> None:
        for session_id in ("s", "t", "u"):
            session, found = self.sessions.get(session_id), None
            for side in self.sides:
                try:
                    found = found or side.store.load(session_id)
                except (SessionNotFound, StaleEpoch):
                    continue
            assert (found is None) == (session is None), session_id
            if session is not None and found is not None:
                assert (unpack_tokens(found.history).tolist(), found.turns) == (
                    session.history,
                    session.turns,
                )

    def teardown(self) -> None:
        for _ in range(2):
            for side in self.sides:
                side.cluster.expire_idle()
        ids = [session_id for side in self.sides for session_id in side.session_ids()]
        assert sorted(ids) == sorted(self.sessions), "each is in one ledger, once all have heard"
        for side in self.sides:
            side.store.disconnect()

    def cluster(self, side: int) -> Cluster:
        return self.sides[side].cluster

    def add(self, opened: Assignment, history: list[int]) -> None:
        assert opened.epoch > self.former_epoch
        self.sessions[opened.session_id] = Session(opened.epoch, list(history))

    def refused(
        self, kinds: type[ControllerError] | tuple[type[ControllerError], ...], call: Callable[[], object]
    ) -> None:
        with pytest.raises(kinds):
            call()


def test_two_clusters_against_the_model(redis_server: RedisServer) -> None:
    machine = type("Machine", (ClustersMachine,), {"server": redis_server})
    run_state_machine_as_test(machine, settings=SETTINGS)
