"""Which SessionStore the settings name."""

from __future__ import annotations

import os
from collections.abc import Callable

from controllers.log_cipher import LogCipher
from controllers.settings import LOG_KEYS, LogSettings, RedisLogSettings
from controllers.sqlite_store import SqliteSessionStore
from controllers.store import SessionStore

OPEN_PATIENCE_S = 10.0
"""How long a controller that starts waits for a log that is away. One that cannot open its log dies, and to start it
again takes longer than Redis needs to answer. Those who call it wait longer, so that they hear why it died."""


def open_store(log: LogSettings, cluster: str, clock: Callable[[], float]) -> SessionStore:
    """`cluster` names the cluster that writes, the same through all restarts of its controller. `clock` returns Unix
    time in seconds. The keys of an encrypted log are in the environment. Raises StoreError."""
    cipher = LogCipher.parse(os.environ.get(LOG_KEYS, ""), encrypts=log.encrypted)
    if isinstance(log, RedisLogSettings):
        from controllers.redis_store import RedisSessionStore  # what every process loads would load redis

        return RedisSessionStore(log, cluster, clock=clock, open_patience_s=OPEN_PATIENCE_S, cipher=cipher)
    return SqliteSessionStore(log.path, clock=clock, full_sync=log.full_sync, cipher=cipher)
