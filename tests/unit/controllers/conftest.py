from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_world import World
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from two_clusters import Upgrade

from controllers.open_store import open_store
from controllers.session_log.store import SessionStore
from controllers.settings import LogSettings, SqliteLogSettings


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    """A cluster with replicas "a" and "b"."""
    world = World(SqliteLogSettings(str(tmp_path / "sessions.db")), clock)
    world.beat("a", "b")
    yield world
    world.store.disconnect()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis for tests that do it no harm. Tests that kill or pause a server start their own."""
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture
def upgrade(redis_server: RedisServer, clock: ManualClock) -> Iterator[Upgrade]:
    upgrade = Upgrade(redis_server, clock)
    yield upgrade
    upgrade.stop()


@pytest.fixture(params=["sqlite", "redis"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> LogSettings:
    """A place for a session log of its own, of either kind."""
    if request.param == "sqlite":
        return SqliteLogSettings(str(tmp_path / "sessions.db"))
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.log()


@pytest.fixture
def reopen(log: LogSettings, clock: ManualClock) -> Iterator[Callable[[], SessionStore]]:
    """Opens the log as a restarted controller does."""
    stores: list[SessionStore] = []

    def reopened() -> SessionStore:
        for store in stores:
            store.disconnect()
        stores[:] = [open_store(log, CLUSTER, clock)]
        return stores[0]

    yield reopened
    for store in stores:
        store.disconnect()
