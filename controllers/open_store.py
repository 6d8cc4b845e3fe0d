"""Which SessionStore the settings name."""

from __future__ import annotations

from collections.abc import Callable

from controllers.redis_store import RedisSessionStore
from controllers.settings import LogSettings, RedisLogSettings
from controllers.sqlite_store import SqliteSessionStore
from controllers.store import SessionStore


def open_store(log: LogSettings, cluster: str, clock: Callable[[], float]) -> SessionStore:
    """`cluster` names the cluster that writes, the same through all restarts of its controller. `clock` returns Unix
    time in seconds. Raises StoreError."""
    if isinstance(log, RedisLogSettings):
        return RedisSessionStore(log, cluster, clock=clock)
    return SqliteSessionStore(log.path, clock=clock, full_sync=log.full_sync)
