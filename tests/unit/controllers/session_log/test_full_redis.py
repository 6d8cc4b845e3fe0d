"""A Redis that has reached its maxmemory: what takes memory is refused, and nothing is lost. All else goes on, and
sessions that end make room again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from store_turns import OTHER, SESSION, append_turn, history_of, of_other, turn_of

from controllers.cluster import Cluster
from controllers.errors import StoreError
from controllers.records import ReplicaStatus
from controllers.session_log.redis_store import RedisSessionStore
from controllers.settings import ClusterSettings

TOKENS = list(range(2000))
ROOM_BYTES = 4 * 1024 * 1024


class FullRedis:
    """A Redis with room for some turns, and a log in it."""

    def __init__(self) -> None:
        self.server = RedisServer("--maxmemory", str(ROOM_BYTES), "--maxmemory-policy", "noeviction")
        self.log = self.server.log()
        self.store = RedisSessionStore(self.log, CLUSTER)

    def have(self, room_bytes: int) -> None:
        with closing(self.server.client()) as client:
            client.config_set("maxmemory", room_bytes)

    def stop(self) -> None:
        self.store.disconnect()
        self.server.stop()


@pytest.fixture
def redis() -> Iterator[FullRedis]:
    made = FullRedis()
    yield made
    made.stop()


def turns_until_it_is_full(store: RedisSessionStore) -> tuple[int, str | None]:
    """Appends turns until one is refused. Returns how many were not, and why that one was."""
    for index in range(10_000):
        try:
            append_turn(store, turn_of(index, index * len(TOKENS), TOKENS))
        except StoreError as refusal:
            return index, refusal.detail
    raise AssertionError("no turn was refused")


def test_turns_fill_it_and_a_session_that_ends_makes_room(redis: FullRedis) -> None:
    """Sessions could not be closed in a full Redis, so it stayed full."""
    redis.store.open(SESSION)
    redis.store.open(OTHER)
    append_turn(redis.store, of_other(turn_of(0, 0, [7])))
    turns, reason = turns_until_it_is_full(redis.store)
    assert "maxmemory" in str(reason)
    assert history_of(redis.store) == TOKENS * turns, "nothing of what was committed is lost"
    redis.have(ROOM_BYTES * 9 // 10)  # full without doubt, not only at the edge
    assert redis.store.close("s")
    append_turn(redis.store, of_other(turn_of(1, 1, TOKENS)))
    assert history_of(redis.store, "other") == [7, *TOKENS]


def test_only_what_takes_memory_is_refused(redis: FullRedis) -> None:
    store = redis.store
    secret = store.link_secret(b"x" * 32)
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2], idempotency_key="k", result=b"answer"))
    redis.have(1)
    for refused in (
        lambda: append_turn(store, turn_of(1, 2, [3])),
        lambda: store.open(OTHER),
        lambda: store.fork("s", 1, OTHER),
    ):
        with pytest.raises(StoreError):
            refused()
    store.assign("s", "b", 2)
    store.touch("s", 9.0)
    store.set_deployment("d")
    assert store.link_secret(b"y" * 32) == secret
    store.changes()
    loaded = store.load("s")
    assert (loaded.num_tokens, loaded.epoch, loaded.replica_id, len(loaded.results)) == (2, 2, "b", 1)
    redis.have(ROOM_BYTES)
    append_turn(store, turn_of(1, 2, [3], epoch=2))
    assert history_of(store) == [1, 2, 3]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_controller_starts_again_and_ends_sessions(redis: FullRedis, shards: int) -> None:
    """It could not open the log, and so nobody could end a session."""
    clock = ManualClock()
    log = replace(redis.server.log(), shards=shards)
    first = RedisSessionStore(log, CLUSTER, clock=clock)
    first.open(SESSION)
    first.disconnect()
    redis.have(1)
    store = RedisSessionStore(log, CLUSTER, clock=clock)
    cluster = Cluster(ClusterSettings(replica_timeout_s=1.0), store, clock, clock)
    clock.advance(2 * SESSION.timeout_s)
    assert cluster.expire_idle() == ["s"]
    assert list(store.load_all_entries()) == []
    store.disconnect()


def test_a_turn_that_finds_it_full_is_committed_once_there_is_room(redis: FullRedis) -> None:
    clock = ManualClock()
    cluster = Cluster(ClusterSettings(), redis.store, clock, clock)
    cluster.register_replica(ReplicaStatus("a", 1000, 1000))
    for name in ("s", "other"):
        cluster.open_session(name, "", None, None)
    redis.have(1)
    turns = [turn_of(0, 0, [1]), of_other(turn_of(0, 0, [2]))]
    assert [type(outcome) for outcome in cluster.commits.commit(turns)] == [StoreError, StoreError]
    with pytest.raises(StoreError):
        cluster.open_session("third", "", None, None)
    assert (cluster.count(), [entry.turns for entry in cluster.sessions()]) == (2, [0, 0])
    redis.have(ROOM_BYTES)
    assert cluster.commits.commit(turns) == [None, None]
    assert [history_of(redis.store, name) for name in ("s", "other")] == [[1], [2]]
