"""Session logs of either kind, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis_server import CLUSTER

from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_store import RedisSessionStore
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.settings import LogSettings, SqliteLogSettings


def opened_log(
    log: LogSettings, clock: Callable[[], float] = time.time, cipher: LogCipher | None = None
) -> SessionStore:
    """Opens the log, the same one each time."""
    if isinstance(log, SqliteLogSettings):
        return SqliteSessionStore(log.file, CLUSTER, clock=clock, cipher=cipher)
    return RedisSessionStore(log, CLUSTER, clock=clock, cipher=cipher)


def stored_bytes(log: LogSettings) -> bytes:
    """All bytes that the log stores. In Redis these are the strings and the hashes."""
    if isinstance(log, SqliteLogSettings):
        return b"".join(file.read_bytes() for file in sorted(Path(log.file).parent.iterdir()))
    found = []
    with redis.Redis.from_url(log.url) as client:
        for key in client.scan_iter(f"{log.prefix}*"):
            match client.type(key):
                case b"string":
                    found.append(client.get(key))
                case b"hash":
                    found += [part for pair in client.hgetall(key).items() for part in pair]
    return b" ".join(found)
