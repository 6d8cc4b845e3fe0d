"""A cluster has one link secret, however often its controller is created anew. Processes ask for it once and keep it.
If it changed, those that ask later could not connect to those that asked before."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from manual_clock import ManualClock
from redis_server import RedisServer
from session_logs import stored_bytes

from controllers.cluster_actor import LINK_SECRET_BYTES, ClusterController
from controllers.errors import StoreError
from controllers.open_store import open_store
from controllers.session_log.log_cipher import KEY_BYTES
from controllers.session_log.store import SessionStore
from controllers.settings import LOG_KEYS, ClusterSettings, LogSettings, RedisLogSettings

Create = Callable[[LogSettings, str], ClusterController]


@pytest.fixture
def create(clock: ManualClock) -> Iterator[Create]:
    """Creates a controller as a process does that finds none. The one before has died."""
    stores: list[SessionStore] = []

    def opened(log: LogSettings, cluster: str, clock: Callable[[], float]) -> SessionStore:
        while stores:
            stores.pop().disconnect()
        stores.append(open_store(log, cluster, clock))
        return stores[0]

    yield lambda log, cluster: ClusterController(
        ClusterSettings(), log, cluster, open_log=opened, clock=clock, timer=clock
    )
    for store in stores:
        store.disconnect()


async def test_a_controller_that_is_created_anew_gives_out_the_same_secret(
    log: LogSettings, create: Create
) -> None:
    """Each creation used to draw another one. After an update to another wire version, front ends and replicas on
    different nodes did not find each other until all of them had been replaced."""
    secret = await create(log, "cluster").link_secret()
    assert len(secret) == LINK_SECRET_BYTES
    assert await create(log, "cluster").link_secret() == secret
    assert await create(log, "cluster").link_secret() == secret


async def test_another_cluster_on_the_same_log_has_a_secret_of_its_own(
    log: LogSettings, create: Create
) -> None:
    """Where several clusters may use the log at the same time, each also keeps its own."""
    old = await create(log, "old").link_secret()
    new = await create(log, "new").link_secret()
    assert new != old
    assert await create(log, "new").link_secret() == new
    if isinstance(log, RedisLogSettings):
        assert await create(log, "old").link_secret() == old


async def test_in_an_encrypted_log_the_secret_is_encrypted_and_outlives_a_change_of_the_key(
    log: LogSettings, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (base64.b64encode(os.urandom(KEY_BYTES)).decode() for _ in range(2))
    plain = await create(log, "plain").link_secret()
    assert plain in stored_bytes(log)
    monkeypatch.setenv(LOG_KEYS, first)
    encrypted = replace(log, encrypted=True)
    secret = await create(encrypted, "cluster").link_secret()
    assert secret not in stored_bytes(encrypted)
    for keys in (f"{second},{first}", second):  # each opening writes it under the first key
        monkeypatch.setenv(LOG_KEYS, keys)
        assert await create(encrypted, "cluster").link_secret() == secret
    monkeypatch.setenv(LOG_KEYS, first)
    with pytest.raises(StoreError, match="the link secret of cluster is encrypted under a key"):
        create(encrypted, "cluster")


def test_the_secret_stays_as_long_as_redis_keeps_the_deployment(
    redis_server: RedisServer, clock: ManualClock
) -> None:
    log = redis_server.log()
    with closing(redis_server.client()) as client:
        store = open_store(log, "cluster", clock)
        store.set_deployment("one")
        store.link_secret(b"s" * LINK_SECRET_BYTES)
        keys = [f"{log.prefix}{name}:cluster" for name in ("deployment", "link_secret")]
        for key in keys:
            assert client.expire(key, 60)
        store.changes()
        assert all(client.ttl(key) > 24 * 3600 for key in keys)
        store.disconnect()
