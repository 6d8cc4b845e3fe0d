from __future__ import annotations

from collections.abc import Iterator

import pytest
from manual_clock import ManualClock
from redis_server import RedisServer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis for tests that do it no harm. Tests that kill or pause a server start their own."""
    server = RedisServer()
    yield server
    server.stop()
