"""The state machine of replicas: what each observer reports, and what no report can undo."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from manual_clock import ManualClock

from controllers.records import ReplicaStatus
from controllers.replicas import SUSPECT_BEATS, ReplicaDirectory, ReplicaState

TIMEOUT_S = 10.0
BEAT_S = 1.0
LIVE, SUSPECT = ReplicaState.LIVE, ReplicaState.SUSPECT
DRAINING, GONE = ReplicaState.DRAINING, ReplicaState.GONE


def _status(replica_id: str = "a", free_tokens: int = 100, draining: bool = False) -> ReplicaStatus:
    return ReplicaStatus(replica_id, free_tokens, 100, draining=draining)


@pytest.fixture
def directory(clock: ManualClock) -> ReplicaDirectory:
    return ReplicaDirectory(clock, TIMEOUT_S, BEAT_S, lambda _: 3)


@pytest.fixture
def live(directory: ReplicaDirectory) -> ReplicaDirectory:
    """A directory with a live replica "a"."""
    directory.register(_status())
    return directory


def _placeable(directory: ReplicaDirectory) -> list[str]:
    return [candidate.replica_id for candidate in directory.candidates()]


def test_the_last_replica_gets_sessions_though_it_drains(live: ReplicaDirectory) -> None:
    """Another replica was there when the drain of "a" began, and then went. The sessions of "a" could go nowhere, so
    the drain never ended, and the sessions of the other replica never found one (simulated seed 30894 of 12 turns)."""
    live.register(_status("b"))
    live.drain("a")
    assert _placeable(live) == ["b"]
    live.unreachable("b", died=True)
    assert _placeable(live) == ["a"]
    live.register(_status("c"))
    assert _placeable(live) == ["c"]


def test_in_a_rolling_update_those_that_go_next_get_no_sessions(directory: ReplicaDirectory) -> None:
    """The sessions of the first replica to go used to be handed to the next one to go, and were computed twice."""
    for name, settings_hash in (("old1", "x"), ("old2", "x"), ("new", "y")):
        directory.register(ReplicaStatus(name, 100, 100, settings_hash=settings_hash))
    assert _placeable(directory) == ["old1", "old2", "new"], "nothing says which of them will go"
    directory.drain("old1")
    assert _placeable(directory) == ["new"]
    assert [status.replica_id for status in directory.settled(TIMEOUT_S)] == ["new"], "nor to even out load"
    directory.unreachable("new", died=True)
    assert _placeable(directory) == ["old2"], "better than nobody"
    assert [status.replica_id for status in directory.settled(TIMEOUT_S)] == ["old2"]


def test_where_all_have_the_same_settings_one_that_drains_is_alone(directory: ReplicaDirectory) -> None:
    for name in ("a", "b", "c"):
        directory.register(ReplicaStatus(name, 100, 100, settings_hash="x"))
    directory.drain("a")
    assert _placeable(directory) == ["b", "c"]


def test_silence_is_death(live: ReplicaDirectory, clock: ManualClock) -> None:
    clock.advance(TIMEOUT_S)
    assert live.state("a") is LIVE
    clock.advance(0.1)
    assert live.state("a") is GONE
    assert live.present() == []
    assert not live.ended("a"), "it may only be slow"


def test_no_heartbeat_brings_back_who_is_gone(live: ReplicaDirectory, clock: ManualClock) -> None:
    clock.advance(TIMEOUT_S + 0.1)
    for _ in range(5):
        assert not live.heartbeat(_status())
        assert live.state("a") is GONE
    live.register(_status())
    assert live.state("a") is LIVE
    assert live.heartbeat(_status())


def test_a_death_that_was_seen_is_one_at_once(live: ReplicaDirectory) -> None:
    assert live.unreachable("a", died=True) is GONE
    assert live.ended("a")
    assert not live.heartbeat(_status())


def test_who_cannot_be_reached_is_suspect_until_it_is_heard_again(
    live: ReplicaDirectory, clock: ManualClock
) -> None:
    assert live.unreachable("a", died=False) is SUSPECT
    live.register(_status("b"))
    assert _placeable(live) == ["b"]
    for _ in range(SUSPECT_BEATS):
        assert live.state("a") is SUSPECT
        clock.advance(BEAT_S)
        assert live.heartbeat(_status())
    assert live.state("a") is LIVE


def test_a_suspect_that_misses_its_heartbeats_is_gone(live: ReplicaDirectory, clock: ManualClock) -> None:
    live.unreachable("a", died=False)
    clock.advance(SUSPECT_BEATS * BEAT_S)
    assert live.state("a") is SUSPECT
    clock.advance(0.6)
    assert live.state("a") is GONE


def test_a_suspect_may_miss_one_heartbeat(live: ReplicaDirectory, clock: ManualClock) -> None:
    """It was gone just before the next one came: they come every interval, and the time that a call takes."""
    period_s = BEAT_S + 0.06
    clock.advance(period_s)
    live.heartbeat(_status())
    live.unreachable("a", died=False)
    clock.advance(2 * period_s)  # the one between is lost
    assert live.state("a") is SUSPECT
    assert live.heartbeat(_status())
    clock.advance(3 * period_s)  # two are lost
    assert not live.heartbeat(_status())


def test_who_nobody_reaches_for_long_is_gone_though_it_is_heard(
    live: ReplicaDirectory, clock: ManualClock
) -> None:
    for _ in range(int(TIMEOUT_S)):
        assert live.unreachable("a", died=False) is SUSPECT
        clock.advance(BEAT_S)
        live.heartbeat(_status())
    clock.advance(0.1)
    assert live.unreachable("a", died=False) is GONE


def test_one_slow_call_now_and_then_is_no_death(live: ReplicaDirectory, clock: ManualClock) -> None:
    """A fork takes 40 s, so its call fails every 15 s, while the replica reports."""
    for second in range(60):
        clock.advance(BEAT_S)
        assert live.heartbeat(_status())
        if second % 15 == 14:
            assert live.unreachable("a", died=False) is SUSPECT
    assert not live.gone("a")


def test_a_replica_never_heard_of_has_time_to_show_up(
    directory: ReplicaDirectory, clock: ManualClock
) -> None:
    assert directory.state("a") is SUSPECT
    clock.advance(TIMEOUT_S + 0.1)
    assert directory.state("a") is GONE
    assert not directory.ended("a")


def test_an_unknown_heartbeat_registers(directory: ReplicaDirectory, clock: ManualClock) -> None:
    assert directory.heartbeat(_status())
    (status,) = directory.present()
    assert (status.replica_id, status.seen_s) == ("a", clock.now_s)


@pytest.mark.parametrize("reason", ["operator", "itself"])
def test_nothing_that_a_replica_says_ends_its_drain(
    live: ReplicaDirectory, clock: ManualClock, reason: str
) -> None:
    if reason == "operator":
        live.drain("a")
    else:
        live.heartbeat(_status(draining=True))
    for _ in range(5):
        assert live.heartbeat(_status())
        live.register(_status(free_tokens=10_000))
        live.register(_status("b"))
        assert live.state("a") is DRAINING
        assert _placeable(live) == ["b"]
    # A replica that was frozen until it counts as gone comes back and is still draining.
    clock.advance(TIMEOUT_S + 0.1)
    assert live.state("a") is GONE
    assert not live.heartbeat(_status())
    live.register(_status())
    assert live.state("a") is DRAINING


def test_a_drain_is_over_with_death_silence_or_farewell(live: ReplicaDirectory, clock: ManualClock) -> None:
    for name in ("b", "c", "d"):
        live.register(_status(name))
        live.drain(name)
    live.unreachable("b", died=True)
    live.deregister("c")
    assert [live.state(name) for name in "bcd"] == [GONE, GONE, DRAINING]
    clock.advance(TIMEOUT_S + 0.1)
    assert live.state("d") is GONE
    live.register(_status("c"))
    assert live.state("c") is DRAINING, "who has said farewell gets no session any more"


def test_a_drain_is_not_forgotten_by_a_directory_that_has_just_begun(directory: ReplicaDirectory) -> None:
    """The replica used to get sessions until its next heartbeat. It had to hand them over at once."""
    directory.drain("a")
    assert directory.state("a") is DRAINING
    directory.heartbeat(_status("a"))
    assert directory.state("a") is DRAINING
    directory.register(_status("b"))
    assert _placeable(directory) == ["b"]


def test_assigned_tokens_last_until_the_next_heartbeat(live: ReplicaDirectory) -> None:
    live.assign_tokens("a", 30)
    live.assign_tokens("a", 12)
    (candidate,) = live.candidates()
    assert (candidate.expected_free_tokens, candidate.sessions) == (58, 3)
    live.heartbeat(_status(free_tokens=70))
    (candidate,) = live.candidates()
    assert candidate.expected_free_tokens == 70


def test_old_news_is_forgotten(directory: ReplicaDirectory, clock: ManualClock) -> None:
    directory.register(_status("silent"))
    directory.register(_status("lost"))
    directory.unreachable("lost", died=True)
    clock.advance(100)
    directory.register(_status("here"))
    directory.forget_silent(50)
    assert [status.replica_id for status in directory.present()] == ["here"]
    assert directory.gone("silent")
    assert directory.gone("lost")
    assert directory.heartbeat(_status("lost"))


NAMES = st.sampled_from(["a", "b", "c"])


class DirectoryMachine(RuleBasedStateMachine):
    """Observers act in any order. A draining replica gets no session while there is another one. A replica that is gone
    comes back only by registering."""

    @initialize()
    def start(self) -> None:
        self.clock = ManualClock()
        self.directory = ReplicaDirectory(self.clock, TIMEOUT_S, BEAT_S, lambda _: 0)
        self.leaving: set[str] = set()
        self.gone: set[str] = set()
        self.beats: dict[str, float] = {}
        self.accused: set[str] = set()

    @rule(name=NAMES)
    def register(self, name: str) -> None:
        self.directory.register(_status(name))
        self.gone.discard(name)
        self.beats[name] = self.clock.now_s

    @rule(name=NAMES, draining=st.booleans())
    def heartbeat(self, name: str, draining: bool) -> None:
        known = self.directory.heartbeat(_status(name, draining=draining))
        assert known == (name not in self.gone)
        if known:
            self.beats[name] = self.clock.now_s
            self.leaving |= {name} if draining else set()

    @rule(name=NAMES, died=st.booleans())
    def unreachable(self, name: str, died: bool) -> None:
        state = self.directory.unreachable(name, died=died)
        self.beats.setdefault(name, self.clock.now_s)
        self.accused.add(name)
        assert not died or state is GONE

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        self.directory.drain(name)
        self.beats.setdefault(name, self.clock.now_s)
        self.leaving.add(name)

    @rule(by_s=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def advance(self, by_s: float) -> None:
        self.clock.advance(by_s)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "directory"):
            return
        for name in "abc":
            state = self.directory.state(name)
            assert not (name in self.leaving and state in (LIVE, SUSPECT)), (name, state)
            assert not (name in self.gone and state is not GONE), (name, state)
            heard = name in self.beats and self.clock.now_s - self.beats[name] <= TIMEOUT_S
            assert not (state is GONE and heard and name not in self.accused), (name, "was heard")
            if name in self.beats and state is GONE:
                self.gone.add(name)
        placeable = set(_placeable(self.directory))
        assert not placeable & self.leaving or placeable <= self.leaving, "only where there is no other"
        assert placeable or not self.directory.present()


DirectoryMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, print_blob=True
)
TestDirectoryAgainstModel = DirectoryMachine.TestCase
