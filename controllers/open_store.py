"""Opens the SessionStore that the settings name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.log_rules import check_shards
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.settings import LOG_KEYS, LogSettings, RedisLogSettings, SqliteLogSettings

_OF_SHARDS = re.compile(r"-\d+-of-(\d+)")
OPEN_PATIENCE_S = 10.0
"""How long a starting controller waits for a log that is away. A controller that cannot open its log dies, and starting
it again takes longer than Redis usually needs to come back. Callers wait longer than this, so that they get the
reason."""


def refuse_other_shards(log: SqliteLogSettings) -> None:
    """Raises StoreError if the folder has a log of another number of shards: sessions would not be found where they
    are."""
    path = Path(log.path)
    for other in path.parent.glob(f"{path.stem}*{path.suffix}"):
        found = _OF_SHARDS.fullmatch(other.stem.removeprefix(path.stem))
        if other == path or found:
            check_shards(1 if found is None else int(found[1]), log.shards, str(path.parent))


def open_store(log: LogSettings, cluster: str, clock: Callable[[], float]) -> SessionStore:
    """Opens the session log. `cluster` names the writing cluster; it stays the same when the controller restarts.
    `clock` returns Unix time in seconds. The keys of an encrypted log are in the environment. Raises StoreError."""
    cipher = LogCipher.parse(os.environ.get(LOG_KEYS, ""), encrypts=log.encrypted)
    if isinstance(log, RedisLogSettings):
        from controllers.session_log.redis_store import (
            RedisSessionStore,  # here, so that others do not load redis
        )

        return RedisSessionStore(log, cluster, clock=clock, open_patience_s=OPEN_PATIENCE_S, cipher=cipher)
    refuse_other_shards(log)
    return SqliteSessionStore(log.file, cluster, clock=clock, full_sync=log.full_sync, cipher=cipher)
