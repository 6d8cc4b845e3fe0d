"""A session log behind Sentinel: what was reported as committed survives the loss of the master, once and in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from redis_sentinels import LONGEST_S, SERVICE, WatchedRedis
from redis_server import CLUSTER, RedisServer
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.errors import StoreError
from controllers.session_log.redis_store import RedisSessionStore
from controllers.settings import RedisLogSettings

pytestmark = [pytest.mark.slow, pytest.mark.waits]

TURNS = 200
LOSES_ITS_MASTER_AT = 60


@pytest.fixture
def watched() -> Iterator[WatchedRedis]:
    watched = WatchedRedis(replicas=2)
    yield watched
    watched.stop()


def until_taken(change: Callable[[], object]) -> int:
    """Repeats the change until it succeeds, as a finished turn does that waits for the log. Returns the number of
    failures."""
    deadline_s = time.monotonic() + LONGEST_S
    for failed in range(1_000_000):
        try:
            change()
        except StoreError:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        else:
            return failed
    raise AssertionError


def opened(watched: WatchedRedis, wait_replicas: int, wait_ms: int = 900) -> RedisSessionStore:
    """Opens the store. It retries, because a replica counts only some time after it began to follow its master."""
    stores: list[RedisSessionStore] = []
    log = replace(watched.log(wait_replicas), wait_ms=wait_ms)
    until_taken(lambda: stores.append(RedisSessionStore(log, CLUSTER)))
    return stores[0]


@pytest.mark.parametrize("loss", ["killed", "frozen"])
def test_a_failover_loses_no_committed_turn(watched: WatchedRedis, loss: str) -> None:
    store = opened(watched, wait_replicas=1)
    store.open(SESSION)
    former, failed = watched.master(), 0
    for index in range(TURNS):
        if index == LOSES_ITS_MASTER_AT:
            (watched.kill if loss == "killed" else watched.pause)(former)
        turn = turn_of(index, index, [index], idempotency_key=f"k{index}")
        failed += until_taken(lambda turn=turn: append_turn(store, turn))  # type: ignore[misc]
    assert failed > 0, "the master was lost while turns were committed"
    assert watched.master() != former
    if loss == "frozen":
        watched.go_on(former)
    assert history_of(store) == list(range(TURNS))
    assert store.load("s").turns == TURNS
    store.disconnect()


def test_a_controller_that_starts_after_a_failover_finds_the_log(watched: WatchedRedis) -> None:
    store = opened(watched, wait_replicas=1)
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    former = watched.master()
    watched.kill(former)
    again = opened(watched, wait_replicas=1)
    assert history_of(again) == [1, 2]
    with pytest.raises(StoreError, match="has taken it over"):
        until_fenced(store)
    for each in (store, again):
        each.disconnect()


def until_fenced(store: RedisSessionStore) -> None:
    """Tries until the store raises that another one has taken over. The former controller's connection breaks first."""
    for index in range(3):
        try:
            append_turn(store, turn_of(1, 2, [3]))
        except StoreError as error:
            if index == 2 or "taken it over" in error.message:
                raise


def test_what_too_few_replicas_have_is_not_told_as_committed(redis_server: RedisServer) -> None:
    """A repetition does not help: it is not enough that the master has the change."""
    named = redis_server.log()
    store = RedisSessionStore(named, CLUSTER)
    store.open(SESSION)
    store.disconnect()
    with pytest.raises(
        StoreError, match=r"cannot open .*0 of its replicas have the change after 50 ms, not 1"
    ):
        RedisSessionStore(RedisLogSettings(named.url, named.name, 1, 50), CLUSTER)


def test_a_repeated_commit_waits_for_replicas_too(watched: WatchedRedis) -> None:
    store = opened(
        watched, wait_replicas=2, wait_ms=400
    )  # well before the client itself gives up, after a second
    store.open(SESSION)
    a_replica = list(watched.servers)[1]
    watched.pause(a_replica)
    for _ in range(2):
        with pytest.raises(StoreError, match="1 of its replicas have the change after 400 ms, not 2"):
            append_turn(store, turn_of(0, 0, [1]))
    watched.go_on(a_replica)
    until_taken(lambda: append_turn(store, turn_of(0, 0, [1])))
    assert history_of(store) == [1]
    store.disconnect()


def test_sentinels_that_do_not_answer_are_named() -> None:
    log = RedisLogSettings(f"redis+sentinel://127.0.0.1:1,127.0.0.1:2/{SERVICE}", "mine")
    with pytest.raises(StoreError, match=f"cannot open .*No master found for '{SERVICE}'") as caught:
        RedisSessionStore(log, CLUSTER)
    assert caught.value.param == "redis_url"


def test_a_service_that_sentinels_do_not_know_is_named(watched: WatchedRedis) -> None:
    url = watched.log(0).url.replace(SERVICE, "unknown")
    with pytest.raises(StoreError, match="No master found for 'unknown'"):
        RedisSessionStore(RedisLogSettings(url, "mine"), CLUSTER)
