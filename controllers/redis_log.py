"""A session log in Redis, as far as it is Redis: how it is opened, claimed by one writer, read and changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from controllers.circuit_breaker import CircuitBreaker
from controllers.errors import StoreError
from controllers.settings import REDIS_PASSWORD, RedisLogSettings

LAYOUT = b"2"
READABLE = (b"1", LAYOUT)
"""Sessions of layout 1 are read as they are, and written anew with their next change."""

TIMEOUT_S = 1.0
"""For each answer: the controller does nothing else meanwhile. A change that takes longer is told again."""

_FORGETFUL = "allkeys-"

_APPLY = """
-- KEYS[1]: the number of the writer. ARGV[1]: the caller's. Then each command: how many words it has, and the words.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local at = 2
while at <= #ARGV do
    local size = tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, at + size))
    at = at + size + 1
end
return 1
"""

Word = str | bytes | int | float
Command = tuple[Word, ...]


class RedisLog:
    """Owns the connection. The last who opened the log is its only writer.

    Raises StoreError if Redis cannot be reached, takes no writes, may forget keys, or has something else there.
    """

    def __init__(self, settings: RedisLogSettings, timer: Callable[[], float]) -> None:
        self._settings = settings
        self._prefix = f"kedge:{{{settings.name}}}:"  # braces: all in one slot of a Redis Cluster
        self._breaker = CircuitBreaker(self._answers, timer, call_timeout_s=TIMEOUT_S)
        try:
            self._redis = redis.Redis.from_url(
                settings.url,
                password=os.environ.get(REDIS_PASSWORD),
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                # For a connection that was closed meanwhile: every change may be made twice.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:
            raise StoreError(f"session log {settings}: {error}", "redis_url") from error
        self._apply = self._redis.register_script(_APPLY)
        try:
            self._writer = self._claim()
        except StoreError as error:
            self.close()
            raise StoreError(f"cannot open {error.message}", "redis_url") from error

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def read(self, *commands: Command) -> list[Any]:
        """Their answers, in one round trip. Nobody writes in between but who has taken the log over."""
        with self._asked():
            pipeline = self._redis.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

    def change(self, commands: Sequence[Command]) -> None:
        """All of them at once, in one round trip, or none. Raises StoreError if another has taken the log over."""
        words: list[Word] = []
        for command in commands:
            words += [len(command), *command]
        with self._asked():
            if not self._apply(keys=[self.key("writer")], args=[self._writer, *words]):
                raise self.error(
                    "another controller has taken it over, or it was emptied"
                    " (each cluster needs a controller.name or a Redis of its own)"
                )

    def close(self) -> None:
        self._redis.close()

    def error(self, reason: str) -> StoreError:
        return StoreError(f"session log {self._settings}: {reason}")

    def _claim(self) -> int:
        with self._asked():
            policy = self._redis.info("memory").get("maxmemory_policy", "")
            if policy.startswith(_FORGETFUL):
                raise self.error(
                    f"with maxmemory-policy {policy} Redis may drop sessions; noeviction keeps them"
                )
            layout = self._redis.get(self.key("layout"))
            if layout not in (None, *READABLE):
                known = LAYOUT.decode()
                raise self.error(
                    f"it has layout {layout!r}; this version of Kedge reads layouts up to {known}"
                )
            self._redis.set(self.key("layout"), LAYOUT)
            return int(self._redis.incr(self.key("writer")))

    @contextmanager
    def _asked(self) -> Iterator[None]:
        if not self._breaker.closed():
            raise self.error("Redis did not answer a moment ago")
        try:
            yield
        except redis.RedisError as error:
            if isinstance(error, redis.TimeoutError):
                self._breaker.open()
            raise self.error(str(error)) from error

    def _answers(self, timeout_s: float) -> bool:
        """Over a connection of its own, as the log would make it, but with less patience."""
        pool = self._redis.connection_pool
        patience = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        connection = pool.connection_class(**pool.connection_kwargs | patience)
        try:
            connection.connect()
            connection.send_command("PING")
            connection.read_response()
        except redis.RedisError:
            return False
        finally:
            connection.disconnect()
        return True
