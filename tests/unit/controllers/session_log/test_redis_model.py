"""The simulation's model of Redis answers the session log's commands as a real Redis does."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import redis
from manual_clock import ManualClock
from redis_server import CLUSTER, RedisServer
from store_turns import SESSION, append_turn, turn_of

from controllers.session_log import redis_log
from controllers.session_log.redis_store import RedisSessionStore
from tests.simulation.redis_model import RedisModel, ReplyError, Words

KEYS = (b"a", b"b", b"c")
FIELDS = (b"1", b"2", b"3")
SCRIPTS = (
    b"return redis.call('GET', KEYS[1])",
    b"return {1, redis.call('HGET', KEYS[1], '1'), 'x', {2.9}, false, 'after'}",
    b"redis.call('SET', KEYS[1], ARGV[1]); return redis.call('SADD', KEYS[1], 1)",
    b"return redis.call('SET', KEYS[1], 7)",
    b"return redis.call('HGETALL', KEYS[1])",
    b"return #ARGV .. ':' .. tostring(redis.call('GET', KEYS[1]))",
    b"return redis.call('NOSUCH')",
    b"nonsense",
)


@pytest.fixture
def real(redis_server: RedisServer) -> Iterator[redis.Connection]:
    with redis_server.client() as client:
        client.flushall()
        connection = client.connection_pool.get_connection()
        yield connection
        connection.disconnect()
        client.flushall()


def command(random: Random) -> Words:
    key, other = random.choices(KEYS, k=2)
    field, value = random.choice(FIELDS), b"%d" % random.randrange(100) * random.choice((0, 1, 3))
    at, end = b"%d" % random.randrange(6), b"%d" % random.randrange(12)
    script = random.choice(SCRIPTS)
    return random.choice(
        (
            [b"GET", key],
            [b"MGET", key, other],
            [b"SET", key, value],
            [b"SET", key, value, b"EX", b"1000"],
            [b"GETRANGE", key, at, end],
            [b"SETRANGE", key, at, value],
            [b"DEL", key, other],
            [b"EXISTS", key],
            [b"EXPIRE", key, b"1000"],
            [b"HGET", key, field],
            [b"HMGET", key, *FIELDS[: random.randrange(1, 4)]],
            [b"HKEYS", key],
            [b"HSTRLEN", key, field],
            [b"HGETALL", key],
            [b"HSET", key, field, value, other, value],
            [b"HDEL", key, *FIELDS[: random.randrange(1, 4)]],
            [b"SADD", key, *FIELDS[: random.randrange(1, 4)]],
            [b"SREM", key, field],
            [b"SISMEMBER", key, field],
            [b"SMEMBERS", key],
            [b"SSCAN", key, b"0", b"COUNT", b"100"],
            [b"ZADD", key, b"%d" % random.randrange(30), field, end, other],
            [b"ZREM", key, *FIELDS[: random.randrange(1, 4)]],
            [b"ZREVRANGE", key, at, end],
            [b"ZSCORE", key, field],
            [b"EVAL", script, b"1", key, value],
            [b"EVALSHA", b"0" * 40, b"0"],
            [b"NOSUCH", key],
        )
    )


def answer_of(connection: redis.Connection, words: Words) -> Any:
    connection.send_command(*words)
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def plain(reply: Any) -> Any:
    """The reply in a form that can be compared: errors by kind, and sets sorted, because they have no order."""
    match reply:
        case redis.exceptions.NoScriptError():
            return "NOSCRIPT"
        case ReplyError() | redis.ResponseError():
            return "WRONGTYPE" if "WRONGTYPE" in str(reply) else str(reply).split(" ")[0].removeprefix("ERR")
        case set() | list():
            return sorted((plain(item) for item in reply), key=repr)
        case bytes():
            return bytes(reply)
    return reply


@pytest.mark.parametrize("seed", range(8))
def test_the_model_answers_as_redis_does(real: redis.Connection, seed: int) -> None:
    random, model = Random(seed), RedisModel(ManualClock())
    for number in range(400):
        words = command(random)
        try:
            got: Any = model.execute(words)
        except ReplyError as error:
            got = error
        expected = plain(answer_of(real, words))
        if isinstance(got, ReplyError) and isinstance(expected, str) and expected != "WRONGTYPE":
            continue  # both refuse it; the texts of script errors differ
        assert plain(got) == expected, (number, words)
        left = {key: plain(answer_of(real, [b"EXISTS", key])) for key in KEYS}
        assert {key: model.execute([b"EXISTS", key]) for key in KEYS} == left, (number, words)


def test_keys_end_when_their_time_is_over() -> None:
    clock = ManualClock()
    model = RedisModel(clock)
    model.execute([b"SET", b"a", b"1", b"EX", b"10"])
    model.execute([b"SET", b"b", b"1", b"EX", b"10"])
    model.execute([b"SET", b"b", b"2"])
    clock.advance(10.0)
    assert [model.execute([b"EXISTS", key]) for key in (b"a", b"b")] == [0, 1]


def test_the_scripts_of_the_log_do_the_same(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both get every command of a store, and must answer the same."""
    model, log = RedisModel(ManualClock()), redis_server.log()
    answers: list[tuple[Any, Any]] = []
    run = redis_log.RedisLog._run

    def run_both(self: redis_log.RedisLog, script: str, keys: list[str], words: list[Any]) -> Any:
        answer = run(self, script, keys, words)
        packed = [word if isinstance(word, bytes) else str(word).encode() for word in (*keys, *words)]
        answers.append((answer, model.execute([b"EVAL", script.encode(), b"%d" % len(keys), *packed])))
        return answer

    monkeypatch.setattr(redis_log.RedisLog, "_run", run_both)
    store, other = RedisSessionStore(log, CLUSTER), RedisSessionStore(log, "other")
    store.open(SESSION)
    for index in range(10):
        append_turn(store, turn_of(index, index, [index], idempotency_key=f"k{index}"))
    other.claim("s", "b")
    store.changes()
    append_turn(other, turn_of(10, 5, [1, 2], epoch=2))
    other.close("s")
    assert len(answers) == 17
    assert all(ours == theirs for theirs, ours in answers), answers
    with redis_server.client() as client:
        for key in (key for key in client.scan_iter() if log.name.encode() in key):
            kind = client.type(key)
            if kind == b"string":
                assert model.get(key) == client.get(key)
            else:
                read = b"HGETALL" if kind == b"hash" else b"SMEMBERS"
                assert plain(model.execute([read, key])) == plain(client.execute_command(read.decode(), key))
    store.disconnect()
    other.disconnect()
