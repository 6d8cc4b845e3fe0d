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
    """For tests that use it as it is meant to be used; those that harm one start their own."""
    server = RedisServer()
    yield server
    server.stop()
