from __future__ import annotations

import pytest
from manual_clock import ManualClock

from controllers.records import ReplicaStatus
from controllers.replicas import ReplicaDirectory

TIMEOUT_S = 10.0


def _status(replica_id: str = "a", free_tokens: int = 100, draining: bool = False) -> ReplicaStatus:
    return ReplicaStatus(replica_id, free_tokens, 100, draining=draining)


@pytest.fixture
def directory(clock: ManualClock) -> ReplicaDirectory:
    return ReplicaDirectory(clock, TIMEOUT_S)


def test_silence_is_death_and_a_heartbeat_life(directory: ReplicaDirectory, clock: ManualClock) -> None:
    directory.register(_status())
    clock.advance(TIMEOUT_S)
    assert directory.alive("a")
    clock.advance(0.1)
    assert not directory.alive("a")
    assert directory.gone("a")
    assert directory.live() == []
    assert directory.heartbeat(_status())
    assert directory.alive("a")
    assert not directory.gone("a")


def test_reported_lost_needs_to_register_again(directory: ReplicaDirectory) -> None:
    directory.register(_status())
    directory.report_lost("a")
    assert directory.lost("a")
    assert directory.gone("a")
    assert not directory.heartbeat(_status())
    assert not directory.alive("a")
    directory.register(_status())
    assert directory.alive("a")
    assert not directory.lost("a")
    assert not directory.gone("a")


def test_a_replica_never_heard_of_has_time_to_show_up(
    directory: ReplicaDirectory, clock: ManualClock
) -> None:
    assert not directory.alive("a")
    assert not directory.gone("a")
    clock.advance(TIMEOUT_S + 0.1)
    assert directory.gone("a")


def test_an_unknown_heartbeat_registers(directory: ReplicaDirectory, clock: ManualClock) -> None:
    assert directory.heartbeat(_status())
    (live,) = directory.live()
    assert (live.replica_id, live.seen_s) == ("a", clock.now_s)


def test_assigned_tokens_last_until_the_next_heartbeat(directory: ReplicaDirectory) -> None:
    directory.register(_status())
    directory.assign_tokens("a", 30)
    directory.assign_tokens("a", 12)
    (candidate,) = directory.candidates(lambda _: 3)
    assert (candidate.expected_free_tokens, candidate.sessions) == (58, 3)
    directory.heartbeat(_status(free_tokens=70))
    (candidate,) = directory.candidates(lambda _: 3)
    assert candidate.expected_free_tokens == 70


def test_draining(directory: ReplicaDirectory) -> None:
    directory.register(_status(draining=True))
    assert directory.draining("a")
    assert not directory.draining("b")
    assert directory.candidates(lambda _: 0)[0].draining


def test_old_news_is_forgotten(directory: ReplicaDirectory, clock: ManualClock) -> None:
    directory.register(_status("silent"))
    directory.register(_status("lost"))
    directory.report_lost("lost")
    clock.advance(100)
    directory.register(_status("here"))
    directory.forget_silent(50)
    assert [status.replica_id for status in directory.live()] == ["here"]
    assert directory.gone("silent")
    assert directory.gone("lost")
    assert directory.heartbeat(_status("lost"))
