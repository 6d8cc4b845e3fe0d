"""A Redis, as far as the session log uses one: keys in memory, commands one at a time, and scripts in real Lua.

`tests/unit/controllers/session_log/test_redis_model.py` runs the same commands on this model and on a real Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from lupa.lua51 import LuaError, LuaRuntime, lua_type

Words = Sequence[bytes]


class Status(bytes):
    """A reply like OK. In a script it is no string."""


class ReplyError(Exception):
    """The error with which a command is refused."""


class Members(dict[bytes, bytes]):
    """A set, in the order in which members were added."""


class Scores(dict[bytes, bytes]):
    """A sorted set: members with their scores, which are whole numbers."""

    def downwards(self) -> list[bytes]:
        return sorted(self, key=lambda member: (int(self[member]), member), reverse=True)


OK = Status(b"OK")
_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class RedisModel:
    """A Redis. `clock` returns seconds. Writes survive `restart`, as with appendfsync always. `written` collects the
    keys that commands wrote, until the caller clears it.

    Sets are small: a scan returns the whole set at once, as Redis does with up to 128 members.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.written: dict[bytes, None] = {}
        self._clock = clock
        self._values: dict[bytes, Any] = {}
        self._expires_s: dict[bytes, float] = {}
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._redis = self._lua.table_from({b"call": self._call})
        self._scripts: dict[bytes, Any] = {}

    def restart(self) -> None:
        """Restarts the Redis, which forgets its scripts."""
        self._scripts.clear()

    def execute(self, words: Words) -> Any:
        """The reply: bytes, int, float, None, a list, a dict or a Status. Raises ReplyError."""
        name = words[0].lower().decode()
        command = getattr(self, f"_do_{name}", None)
        if command is None:
            raise ReplyError(f"ERR unknown command '{name}'")
        try:
            return command(*words[1:])
        except TypeError as error:
            raise ReplyError(f"ERR wrong number of arguments for '{name}' command") from error

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, for checks that bypass the client."""
        value: bytes | None = self._value(key, bytes)
        return value

    def _value(self, key: bytes, kind: type | None = None) -> Any:
        """The value of a key, or None if there is none. Raises ReplyError if it is of another kind."""
        if key in self._expires_s and self._expires_s[key] <= self._clock():
            self._drop(key)
        value = self._values.get(key)
        if value is not None and kind not in (None, type(value)):
            raise ReplyError(_WRONG_TYPE)
        return value

    def _put(self, key: bytes, value: Any) -> None:
        self._values[key] = value
        self.written[key] = None

    def _grown(self, key: bytes, kind: type, members: dict[bytes, bytes]) -> int:
        """Adds members. Returns how many are new."""
        found: dict[bytes, bytes] = self._value(key, kind) or kind()
        before = len(found)
        found.update(members)
        self._put(key, found)
        return len(found) - before

    def _drop(self, key: bytes) -> bool:
        self._expires_s.pop(key, None)
        self.written[key] = None
        return self._values.pop(key, None) is not None

    def _shrunk(self, key: bytes, kind: type, members: Words) -> int:
        """Removes members. Returns how many there were. A value without members ceases to exist."""
        found: dict[bytes, bytes] = self._value(key, kind) or kind()
        gone = sum(found.pop(member, self) is not self for member in members)
        if gone:
            self.written[key] = None
            if not found:
                self._drop(key)
        return gone

    # Commands, in the order of Redis' own documentation.

    def _do_ping(self) -> Status:
        return Status(b"PONG")

    def _do_hello(self, version: bytes) -> dict[bytes, Any]:
        return {b"server": b"redis", b"version": b"7.0.0", b"proto": int(version), b"role": b"master"}

    def _do_client(self, what: bytes, *_: bytes) -> Status:
        if what.lower() != b"setinfo":
            raise ReplyError(f"ERR unknown subcommand '{what.decode()}'")
        return OK

    def _do_info(self, _section: bytes) -> bytes:
        return b"# Memory\r\nmaxmemory_policy:noeviction\r\n"

    def _do_get(self, key: bytes) -> bytes | None:
        return self.get(key)

    def _do_mget(self, *keys: bytes) -> list[bytes | None]:
        found = (self._value(key) for key in keys)
        return [value if type(value) is bytes else None for value in found]

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> Status:
        self._expires_s.pop(key, None)
        self._put(key, value)
        if options:
            unit, seconds = options
            assert unit == b"EX"
            self._expires_s[key] = self._clock() + int(seconds)
        return OK

    def _do_getrange(self, key: bytes, start: bytes, end: bytes) -> bytes:
        return (self.get(key) or b"")[int(start) : int(end) + 1]

    def _do_setrange(self, key: bytes, offset: bytes, value: bytes) -> int:
        start, old = int(offset), self.get(key) or b""
        if value:
            self._put(key, old[:start].ljust(start, b"\0") + value + old[start + len(value) :])
        return len(self.get(key) or b"")

    def _do_del(self, *keys: bytes) -> int:
        return sum(self._value(key) is not None and self._drop(key) for key in keys)

    def _do_exists(self, *keys: bytes) -> int:
        return sum(self._value(key) is not None for key in keys)

    def _do_expire(self, key: bytes, seconds: bytes) -> int:
        if self._value(key) is None:
            return 0
        self._expires_s[key] = self._clock() + int(seconds)
        return 1

    def _do_hget(self, key: bytes, field: bytes) -> bytes | None:
        return (self._value(key, dict) or {}).get(field)

    def _do_hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        return [self._do_hget(key, field) for field in fields]

    def _do_hkeys(self, key: bytes) -> list[bytes]:
        return list(self._value(key, dict) or ())

    def _do_hstrlen(self, key: bytes, field: bytes) -> int:
        return len(self._do_hget(key, field) or b"")

    def _do_hgetall(self, key: bytes) -> dict[bytes, bytes]:
        return dict(self._value(key, dict) or {})

    def _do_hset(self, key: bytes, *pairs: bytes) -> int:
        return self._grown(key, dict, dict(zip(pairs[::2], pairs[1::2], strict=True)))

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        return self._shrunk(key, dict, fields)

    def _do_sadd(self, key: bytes, *members: bytes) -> int:
        return self._grown(key, Members, dict.fromkeys(members, b""))

    def _do_srem(self, key: bytes, *members: bytes) -> int:
        return self._shrunk(key, Members, members)

    def _do_sismember(self, key: bytes, member: bytes) -> int:
        return int(member in (self._value(key, Members) or ()))

    def _do_smembers(self, key: bytes) -> list[bytes]:
        return list(self._value(key, Members) or ())

    def _do_sscan(self, key: bytes, _cursor: bytes, *_count: bytes) -> list[Any]:
        return [b"0", self._do_smembers(key)]

    def _do_zadd(self, key: bytes, *pairs: bytes) -> int:
        return self._grown(key, Scores, dict(zip(pairs[1::2], pairs[::2], strict=True)))

    def _do_zrem(self, key: bytes, *members: bytes) -> int:
        return self._shrunk(key, Scores, members)

    def _do_zrevrange(self, key: bytes, start: bytes, end: bytes) -> list[bytes]:
        found: Scores = self._value(key, Scores) or Scores()
        return found.downwards()[int(start) : int(end) + 1]

    def _do_zscore(self, key: bytes, member: bytes) -> float | None:
        score = (self._value(key, Scores) or {}).get(member)
        return None if score is None else float(score)

    def _do_eval(self, script: bytes, count: bytes, *words: bytes) -> Any:
        digest = hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()
        if digest not in self._scripts:
            try:
                code = b"return function(redis, KEYS, ARGV) " + script + b"\nend"
                self._scripts[digest] = self._lua.execute(code)
            except LuaError as error:
                raise ReplyError(f"ERR Error compiling script: {error}") from error
        return self._do_evalsha(digest, count, *words)

    def _do_evalsha(self, digest: bytes, count: bytes, *words: bytes) -> Any:
        script = self._scripts.get(digest)
        if script is None:
            raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        keys, arguments = words[: int(count)], words[int(count) :]
        try:
            answer = script(self._redis, self._lua.table_from(keys), self._lua.table_from(arguments))
        except LuaError as error:
            raise ReplyError(f"ERR {error} script: {digest.decode()}") from error
        return _from_lua(answer)

    def _call(self, *words: bytes | float) -> Any:
        """`redis.call` in a script. A refused command ends the script; what the script wrote before stays."""
        reply = self.execute([word if isinstance(word, bytes) else b"%.17g" % word for word in words])
        return self._to_lua(reply)

    def _to_lua(self, reply: Any) -> Any:
        match reply:
            case None:
                return False
            case Status():
                return self._lua.table_from({b"ok": bytes(reply)})
            case dict():
                return self._to_lua([word for pair in reply.items() for word in pair])
            case list():
                return self._lua.table_from([self._to_lua(item) for item in reply])
            case _:
                return reply


def _from_lua(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, bytes):
        return value
    if lua_type(value) != "table":
        return int(value)
    if (status := value[b"ok"]) is not None:
        return Status(status)
    items = []
    while (item := value[len(items) + 1]) is not None:
        items.append(_from_lua(item))
    return items
