"""The controller as a real Ray actor. However it is killed, it finds ownership and histories intact."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from controllers.cluster_actor import get_or_create_controller
from controllers.errors import (
    ControllerError,
    Overloaded,
    SessionExists,
    SessionNotFound,
    SettingsRefused,
    StaleEpoch,
)
from controllers.records import Assignment, ReplicaStatus, TurnRecord
from controllers.settings import ClusterSettings, Deployment, LogSettings, SqliteLogSettings
from controllers.tokens import encode_tokens, unpack_tokens
from tests.unit.controllers.redis_server import RedisServer

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray")]

NAMESPACE = "cluster-actor-test"
AWAY_S = 4.0
START_S = 30.0
RECORDED_S = 30.0
"""How long Ray may take to tell the GCS of a call. It does so each second."""


def create(name: str, log: LogSettings) -> ActorHandle:
    return get_or_create_controller(name, NAMESPACE, ClusterSettings(replica_timeout_s=60.0), log)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "redis"])
def controller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActorHandle]:
    log: LogSettings = SqliteLogSettings(str(tmp_path / "sessions.db"))
    if request.param == "redis":
        log = request.getfixturevalue("redis_server").log()
    handle = create(tmp_path.name, log)
    for replica_id in ("a", "b"):
        ray.get(handle.register_replica.remote(ReplicaStatus(replica_id, 1000, 1000)))
    yield handle
    ray.kill(handle)


def _pid(handle: ActorHandle) -> int:
    """Process id of the actor. Runs a function in its process."""
    return int(ray.get(handle.__ray_call__.remote(lambda _: os.getpid())))


def _kill_by_ray(handle: ActorHandle) -> None:
    ray.kill(handle, no_restart=False)


def _kill_by_signal(handle: ActorHandle) -> None:
    os.kill(_pid(handle), signal.SIGKILL)


def _commit(handle: ActorHandle, record: TurnRecord) -> None:
    (error,) = ray.get(handle.commit_turns.remote([record]))
    if error is not None:
        raise error


def _run_turns(
    handle: ActorHandle, owners: dict[str, Assignment], histories: dict[str, list[int]], rng: random.Random
) -> None:
    """Runs a few turns on every session, some with a rewind. `histories` gets what the histories must be."""
    entries = {entry.session_id: entry for entry in ray.get(handle.sessions.remote())}
    for session_id, owner in owners.items():
        turn_index = entries[session_id].turns
        for index in range(turn_index, turn_index + rng.randint(1, 3)):
            history = histories[session_id]
            start_len = rng.randint(0, len(history)) if rng.random() < 0.3 else len(history)
            tokens = [rng.randrange(2**32) for _ in range(rng.randint(1, 50))]
            record = TurnRecord(session_id, owner.epoch, index, start_len, encode_tokens(tokens), 1)
            _commit(handle, record)
            histories[session_id] = history[:start_len] + tokens


def _check(handle: ActorHandle, owners: dict[str, Assignment], histories: dict[str, list[int]]) -> None:
    for session_id, owner in owners.items():
        resolved = ray.get(handle.resolve.remote(session_id))
        assert (resolved.replica_id, resolved.epoch) == (owner.replica_id, owner.epoch)
        record = ray.get(handle.load_session.remote(session_id, owner.epoch, owner.replica_id))
        assert unpack_tokens(record.history).tolist() == histories[session_id]


def test_killing_the_actor_loses_nothing(controller: ActorHandle) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    owners = {f"s{index}": ray.get(controller.open_session.remote(f"s{index}")) for index in range(6)}
    assert {owner.replica_id for owner in owners.values()} == {"a", "b"}
    histories: dict[str, list[int]] = {session_id: [] for session_id in owners}
    for kill in (_kill_by_ray, _kill_by_signal, _kill_by_ray):
        _run_turns(controller, owners, histories, rng)
        pid = _pid(controller)
        kill(controller)
        _check(controller, owners, histories)
        assert _pid(controller) != pid
    _run_turns(controller, owners, histories, rng)
    _check(controller, owners, histories)


def test_a_kill_amid_commits_loses_and_repeats_none(controller: ActorHandle) -> None:
    """Ray repeats calls whose answer was lost with the process, whether or not their turn had reached the log."""
    owners = ray.get([controller.open_session.remote(f"s{index}") for index in range(200)])
    pid = _pid(controller)
    calls = [
        controller.commit_turns.remote([TurnRecord(owner.session_id, 1, 0, 0, encode_tokens([index, 7]), 1)])
        for index, owner in enumerate(owners)
    ]
    ray.wait(calls, num_returns=20)
    os.kill(pid, signal.SIGKILL)
    assert ray.get(calls) == [[None]] * len(owners)
    for index, owner in enumerate(owners):
        record = ray.get(controller.load_session.remote(owner.session_id, 1, owner.replica_id))
        assert (unpack_tokens(record.history).tolist(), record.turns) == ([index, 7], 1)


def test_moved_ownership_survives(controller: ActorHandle) -> None:
    opened = ray.get(controller.open_session.remote("s"))
    record = TurnRecord("s", 1, 0, 0, encode_tokens([1, 2]), 1, "key", b"result")
    _commit(controller, record)
    assert ray.get(controller.report_unreachable.remote(opened.replica_id, True))
    moved = ray.get(controller.resolve.remote("s"))
    assert (moved.epoch, moved.fresh) == (2, True)
    _kill_by_signal(controller)
    assert ray.get(controller.resolve.remote("s")) == Assignment("s", moved.replica_id, 2, fresh=False)
    with pytest.raises(StaleEpoch):
        _commit(controller, TurnRecord("s", 1, 1, 2, encode_tokens([3]), 1))
    loaded = ray.get(controller.load_session.remote("s", 2, moved.replica_id))
    assert unpack_tokens(loaded.history).tolist() == [1, 2]
    assert [result.result for result in loaded.results] == [b"result"]


def test_errors_arrive_typed(controller: ActorHandle) -> None:
    ray.get(controller.open_session.remote("s"))
    with pytest.raises(SessionExists) as exists:
        ray.get(controller.open_session.remote("s"))
    assert (exists.value.code, exists.value.param) == ("session_exists", "session_id")
    with pytest.raises(SessionNotFound) as missing:
        ray.get(controller.resolve.remote("s", False, "other"))
    assert isinstance(missing.value, ControllerError)
    assert missing.value.message == "no session 's'"


def test_one_controller_per_name(controller: ActorHandle, tmp_path: Path) -> None:
    again = create(tmp_path.name, SqliteLogSettings(str(tmp_path / "other.db")))
    assert _pid(again) == _pid(controller)
    assert not (tmp_path / "other.db").exists()


def test_settings_of_the_newest_deployment_outlive_the_actor(controller: ActorHandle, tmp_path: Path) -> None:
    """Ray restarts the actor with its first settings, and replicas of an earlier deployment connect to it."""
    log = ray.get(controller.__ray_call__.remote(lambda itself: itself._deployments._log))
    first, changed = ClusterSettings(replica_timeout_s=60.0), ClusterSettings(max_sessions=1)
    ray.get(controller.announce.remote(Deployment("first", first, log)))
    ray.get(controller.open_session.remote("s"))
    ray.get(controller.announce.remote(Deployment("changed", changed, log)))
    _kill_by_signal(controller)
    ray.get(controller.announce.remote(Deployment("first", first, log)))
    ray.get(controller.register_replica.remote(ReplicaStatus("a", 1000, 1000)))
    with pytest.raises(Overloaded):
        ray.get(controller.open_session.remote("t"))
    assert ray.get(controller.resolve.remote("s")).session_id == "s"
    other = SqliteLogSettings(str(tmp_path / "other.db"))
    with pytest.raises(SettingsRefused, match=r"cannot be changed from .* to .*other\.db"):
        ray.get(controller.announce.remote(Deployment("other", first, other)))
    assert not (tmp_path / "other.db").exists()


def test_a_log_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "garbage.db"
    path.write_bytes(b"no database at all" * 100)
    handle = create("broken", SqliteLogSettings(str(path)))
    with pytest.raises(
        ray.exceptions.ActorDiedError, match=r"StoreError: cannot open session log .*garbage\.db"
    ):
        ray.get(handle.measures.remote())


def test_a_controller_that_starts_while_redis_is_away_waits_for_it(tmp_path: Path) -> None:
    """Earlier the controller died, and callers had to start it again until Redis was back."""
    server = RedisServer()
    log = server.log()
    server.kill()
    try:
        controller = create(tmp_path.name, log)
        answer = controller.sessions.remote()
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(answer, timeout=AWAY_S)
        server.start()
        assert ray.get(answer, timeout=START_S) == []
        ray.kill(controller)
    finally:
        server.stop()


def test_ray_keeps_no_records_of_calls(tmp_path: Path) -> None:
    """Each call left some 3 KB in the GCS, until it had those of 100,000 calls."""
    log = SqliteLogSettings(str(tmp_path / "sessions.db"))
    created = create(tmp_path.name, log)
    found = ray.get_actor(tmp_path.name, namespace=NAMESPACE)
    ray.get([created.measures.remote(), found.replicas.remote()])
    recorded = found.__ray_call__.options(enable_task_events=True)
    ray.get(recorded.remote(lambda _: None))  # by the same processes, and later
    names: set[str] = set()
    until_s = time.monotonic() + RECORDED_S
    while "__ray_call__" not in names and time.monotonic() < until_s:
        time.sleep(0.1)
        names = {event["name"] for event in ray.timeline()}
    ray.kill(created)
    assert "__ray_call__" in names
    assert not names & {"measures", "replicas"}
