"""Opens the SessionStore that the settings name."""

from __future__ import annotations

import os
from collections.abc import Callable

from controllers.log_cipher import LogCipher
from controllers.settings import LOG_KEYS, LogSettings, RedisLogSettings
from controllers.sqlite_store import SqliteSessionStore
from controllers.store import SessionStore

OPEN_PATIENCE_S = 10.0
"""How long a starting controller waits for a log that is away. A controller that cannot open its log dies, and starting
it again takes longer than Redis usually needs to come back. Callers wait longer than this, so that they get the
reason."""


def open_store(log: LogSettings, cluster: str, clock: Callable[[], float]) -> SessionStore:
    """Opens the session log. `cluster` names the writing cluster; it stays the same when the controller restarts.
    `clock` returns Unix time in seconds. The keys of an encrypted log are in the environment. Raises StoreError."""
    cipher = LogCipher.parse(os.environ.get(LOG_KEYS, ""), encrypts=log.encrypted)
    if isinstance(log, RedisLogSettings):
        from controllers.redis_store import RedisSessionStore  # here, so that others do not load redis

        return RedisSessionStore(log, cluster, clock=clock, open_patience_s=OPEN_PATIENCE_S, cipher=cipher)
    return SqliteSessionStore(log.path, clock=clock, full_sync=log.full_sync, cipher=cipher)
