"""The Redis part of a session log in Redis: how it is opened, who may write, how it is read and changed."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import redis
from redis.sentinel import MasterNotFoundError

from controllers.errors import StoreError
from controllers.session_log.circuit_breaker import CircuitBreaker
from controllers.session_log.log_rules import check_shards
from controllers.session_log.redis_connection import Connect, connect_redis
from controllers.settings import RedisLogSettings

LAYOUT = b"2"
READABLE = (b"1", LAYOUT)
"""Sessions of layout 1 are read as they are, and written in the new layout with their next change. They name no writer:
one number, `writer`, stood for all of them."""

FIELDS_AT_ONCE = 1000
"""The most fields of a hash in one command: a script cannot pass on many more words."""

ALIVE_S = 60
"""A cluster is gone once it has given no sign of life for this long, by the clock of Redis."""


TIMEOUT_S = 1.0
"""The timeout for each answer: the controller does nothing else meanwhile. A change that takes longer is repeated."""

OPEN_PAUSE_S = 0.2

_FORGETFUL = "allkeys-"

_OPEN = """
-- KEYS: layout, writer (of the former layout), writers, alive. ARGV: layout, former layout, cluster, nonce, seconds.
local layout = redis.call('GET', KEYS[1])
if layout and layout ~= ARGV[1] and layout ~= ARGV[2] then return {0, layout} end
-- The former layout's writer knows nothing of claims: it may write no more. Redis, if it is full, runs what comes after
-- a write that takes no memory.
if layout then redis.call('DEL', KEYS[2]) end
redis.call('SET', KEYS[1], ARGV[1])
local former = redis.call('HGET', KEYS[3], ARGV[3]) or '0'
local number = tonumber(string.match(former, '^%d+')) + 1
redis.call('HSET', KEYS[3], ARGV[3], number .. ':' .. ARGV[4])
redis.call('SET', KEYS[4], 1, 'EX', ARGV[5])
return {number, layout}
"""

_READ = """
-- ARGV: of each command how many words, and the words. Their answers.
local answers = {}
local at = 1
while at <= #ARGV do
    local size = tonumber(ARGV[at])
    answers[#answers + 1] = redis.call(unpack(ARGV, at + 1, at + size))
    at = at + size + 1
end
return answers
"""

_CHANGE = """
-- KEYS[1]: the writers. ARGV: the caller's cluster, its number, its nonce; then each change: how many guards it has,
-- the key and the text of each, how many commands it has, and of each command how many words, and the words.
-- 0: fenced. Else of each change 1: done, 2: a guard failed.
local stored = redis.call('HGET', KEYS[1], ARGV[1])
local mine = ARGV[2] .. ':' .. ARGV[3]
if stored ~= mine then
    -- A lower number is an earlier controller's: a failover of Redis lost that this one had opened the log.
    if not stored or tonumber(string.match(stored, '^%d+')) >= tonumber(ARGV[2]) then return 0 end
    redis.call('HSET', KEYS[1], ARGV[1], mine)
end
local at = 4
local outcomes = {}
while at <= #ARGV do
    local outcome = 1
    local guards = tonumber(ARGV[at])
    for guard = at + 1, at + 2 * guards, 2 do
        if (redis.call('GET', ARGV[guard]) or '') ~= ARGV[guard + 1] then outcome = 2 end
    end
    at = at + 2 * guards + 1
    local commands = tonumber(ARGV[at])
    at = at + 1
    for _ = 1, commands do
        local size = tonumber(ARGV[at])
        if outcome == 1 then redis.call(unpack(ARGV, at + 1, at + size)) end
        at = at + size + 1
    end
    outcomes[#outcomes + 1] = outcome
end
return outcomes
"""

Word = str | bytes | int | float
Command = tuple[Word, ...]
Guards = Mapping[str, bytes | None]
"""What a change was derived from: keys and the texts that they had (None: the key did not exist)."""


class LogReader(Protocol):
    """The reading part of a RedisLog."""

    def key(self, *parts: str) -> str: ...

    def read(self, *commands: Command) -> list[Any]: ...


class RedisLog:
    """Owns the connection. `cluster` names the writing cluster, and stays the same when the controller restarts.

    In each cluster only the controller that opened the log last may write. Clusters do not fence each other: a
    session's text, which guards compare, says which cluster may change it.

    Raises StoreError if Redis cannot be reached within `open_patience_s`, takes no writes or may drop keys, or if the
    log there has an unknown layout.
    """

    def __init__(
        self,
        settings: RedisLogSettings,
        cluster: str,
        timer: Callable[[], float],
        connect: Connect = connect_redis,
        *,
        open_patience_s: float = 0.0,
    ) -> None:
        self.cluster = cluster
        self._settings = settings
        self._prefix = settings.prefix
        self._nonce = secrets.token_hex(8)
        self._breaker = CircuitBreaker(self._answers, timer, call_timeout_s=TIMEOUT_S)
        try:
            self._redis = connect(settings, TIMEOUT_S)
        except ValueError as error:
            raise StoreError(f"session log: {error}", "redis_url", str(settings)) from error
        try:
            self._await_server(timer, timer() + open_patience_s)
            self._number = self._open()
        except StoreError as error:
            self.close()
            raise StoreError(f"cannot open {error}", "redis_url") from error

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def alive_key(self, cluster: str) -> str:
        """The key that exists while the cluster's controller is alive. Each sweep renews it."""
        return self.key("alive", cluster)

    def read(self, *commands: Command) -> list[Any]:
        """The commands' answers, in one round trip. Nobody writes in between."""
        with self._asked():
            pipeline = self._redis.pipeline(transaction=len(commands) > 1)
            for command in commands:
                pipeline.execute_command(*command)
            try:
                return list(pipeline.execute())
            except redis.exceptions.OutOfMemoryError:
                return self._read_though_full(commands)

    def change(
        self, commands: Sequence[Command], guards: Guards | None = None, *, though_full: bool = False
    ) -> bool:
        """Runs all of the commands at once, in one round trip. Returns False, and runs none, if a guard does not hold
        any more. A change that takes hardly any memory is made `though_full`: others are refused by a Redis that has
        reached its maxmemory.

        When a change whose answer was lost is repeated, its guards fail although the change was made. Raises StoreError
        if another controller of this cluster has taken the log over. Also raises StoreError if too few replicas of
        Redis have the change in time: it is then made, but may be lost with the master.
        """
        # Redis refuses a script at its first write only, and never this one, which takes no memory.
        first: list[Command] = [("EXPIRE", self.alive_key(self.cluster), ALIVE_S)] if though_full else []
        (made,) = self.change_each([([*first, *commands], guards or {})])
        return made

    def change_each(self, changes: Sequence[tuple[Sequence[Command], Guards]]) -> list[bool]:
        """Makes several changes one after the other, in one round trip. Each is made or not by itself, see `change`."""
        words: list[Word] = [self.cluster, self._number, self._nonce]
        for commands, guards in changes:
            words.append(len(guards))
            for key, text in guards.items():
                words += [key, text or b""]
            words.append(len(commands))
            for command in commands:
                words += [len(command), *command]
        with self._asked():
            outcomes = self._run(_CHANGE, [self.key("writers")], words)
            if not outcomes:
                raise self.error("another controller of this cluster has taken it over, or it was emptied")
            return [outcome == 1 for outcome in outcomes]

    def confirm(self) -> None:
        """Makes sure that as many replicas of Redis as the settings say have all of the log, or raises StoreError. It
        is for a change that an earlier try has already made: that try may have failed for lack of replicas."""
        if self._settings.wait_replicas:
            self.change([("SET", self.alive_key(self.cluster), 1, "EX", ALIVE_S)], though_full=True)

    def close(self) -> None:
        self._redis.close()

    def error(self, reason: str, said: str | None = None) -> StoreError:
        """An error of the log. `said` is the message of a library, which may name addresses; clients do not see it."""
        where = str(self._settings)
        return StoreError(f"session log: {reason}", detail=where if said is None else f"{where}: {said}")

    def _await_server(self, timer: Callable[[], float], deadline_s: float) -> None:
        """Waits until Redis answers, or until `deadline_s`. If it does not answer, opening the log gives the reason."""
        while timer() < deadline_s and not self._answers(TIMEOUT_S):
            time.sleep(OPEN_PAUSE_S)

    def _open(self) -> int:
        with self._asked():
            policy = self._redis.info("memory").get("maxmemory_policy", "")
            if policy.startswith(_FORGETFUL):
                raise self.error(
                    f"with maxmemory-policy {policy} Redis may drop sessions; noeviction keeps them"
                )
            found = self._check_shards()
            keys = [self.key("layout"), self.key("writer"), self.key("writers"), self.alive_key(self.cluster)]
            words: list[Word] = [LAYOUT, READABLE[0], self.cluster, self._nonce, ALIVE_S]
            number, layout = self._run(_OPEN, keys, words)
            if not number:
                raise self.error(
                    f"it has layout {layout!r}; this version of Kedge reads layouts up to {LAYOUT.decode()}"
                )
            if self._settings.shards > 1 and not found:
                self._redis.set(self._settings.common_prefix + "shards", self._settings.shards, nx=True)
            return int(number)

    def _check_shards(self) -> bool:
        """Whether the log says how many shards there are. Raises StoreError if a log of this name has another number of
        them: sessions would not be found where they are."""
        num_shards, common = self._settings.shards, self._settings.common_prefix
        found = self._redis.get(common + "shards")
        if found is None and not self._redis.exists(common + "layout"):
            return False
        check_shards(int(found or 1), num_shards, f"{self._settings.name} in Redis")
        return found is not None

    def _read_though_full(self, commands: Sequence[Command]) -> list[Any]:
        """A Redis that is full takes no MULTI, even of reads, but a script that writes nothing."""
        words: list[Word] = []
        for command in commands:
            words += [len(command), *command]
        answers = self._redis.eval(_READ, 0, *words)
        return [
            dict(zip(answer[::2], answer[1::2], strict=True)) if command[0] == "HGETALL" else answer
            for command, answer in zip(commands, answers, strict=True)
        ]

    def _run(self, script: str, keys: Sequence[str], words: Sequence[Word]) -> Any:
        """Runs a script and returns its answer once enough replicas have what it wrote. The whole script is sent only
        to a server that does not know it, after a restart or a failover."""
        digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        wait_replicas, wait_ms = self._settings.wait_replicas, self._settings.wait_ms
        for command in (("EVALSHA", digest), ("EVAL", script)):
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.execute_command(*command, len(keys), *keys, *words)
            if wait_replicas:
                pipeline.execute_command("WAIT", wait_replicas, wait_ms)
            answer, *waited = pipeline.execute(raise_on_error=False)
            if not isinstance(answer, redis.exceptions.NoScriptError):
                break
        for error in (answer, *waited):
            if isinstance(error, Exception):
                raise error
        if waited and waited[0] < wait_replicas:
            raise self.error(
                f"{waited[0]} of its replicas have the change after {wait_ms} ms, not {wait_replicas}"
            )
        return answer

    @contextmanager
    def _asked(self) -> Iterator[None]:
        if not self._breaker.closed():
            raise self.error("Redis did not answer a moment ago")
        try:
            yield
        except redis.RedisError as error:
            if isinstance(error, redis.TimeoutError | MasterNotFoundError):
                self._breaker.open()
            raise self.error("Redis does not answer as it should", str(error)) from error

    def _answers(self, timeout_s: float) -> bool:
        """Whether Redis answers a ping within `timeout_s`, on a new connection that is made like the log's own."""
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
