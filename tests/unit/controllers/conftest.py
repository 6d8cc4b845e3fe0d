from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_world import World
from manual_clock import ManualClock
from redis_server import RedisServer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    """A cluster with replicas "a" and "b"."""
    world = World(tmp_path / "sessions.db", clock)
    world.beat("a", "b")
    yield world
    world.store.disconnect()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis for tests that do it no harm. Tests that kill or pause a server start their own."""
    server = RedisServer()
    yield server
    server.stop()
