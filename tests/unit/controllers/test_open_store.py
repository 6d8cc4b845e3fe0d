"""A controller that starts while Redis is away waits for it. An error that waiting cannot cure is raised at once."""

from __future__ import annotations

import threading
import time

import pytest

from controllers.errors import StoreError
from controllers.open_store import open_store
from controllers.session_log.redis_store import RedisSessionStore
from tests.unit.controllers.redis_server import CLUSTER, RedisServer

AWAY_S = 1.0


def test_a_redis_that_comes_back_is_waited_for() -> None:
    """The controller used to die, and was started again and again until Redis was there."""
    server = RedisServer()
    log = server.log()
    server.kill()
    back = threading.Timer(AWAY_S, server.start)
    back.start()
    try:
        began_s = time.monotonic()
        store = open_store(log, CLUSTER, time.time)
        assert time.monotonic() - began_s >= AWAY_S
        assert list(store.load_all_entries()) == []
        store.disconnect()
    finally:
        back.join()
        server.stop()


def test_a_redis_that_stays_away_is_given_up() -> None:
    server = RedisServer()
    log = server.log()
    server.kill()
    try:
        began_s = time.monotonic()
        with pytest.raises(StoreError, match=r"^cannot open session log"):
            RedisSessionStore(log, CLUSTER, open_patience_s=AWAY_S)
        assert AWAY_S <= time.monotonic() - began_s < 5 * AWAY_S
    finally:
        server.start()
        server.stop()
