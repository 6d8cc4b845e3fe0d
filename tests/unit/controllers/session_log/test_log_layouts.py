"""Logs of the version before are read and continued. Logs of newer versions are refused by name.

`recorded/` holds such logs unchanged. Each has the session `s` of SESSION with two turns, and a closed session.
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from redis_server import CLUSTER, RedisServer
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.errors import SessionNotFound, StoreError
from controllers.records import ModelFingerprint, StoredResult
from controllers.session_log.redis_histories import START_BYTES
from controllers.session_log.redis_store import RedisSessionStore
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.tokens import encode_tokens

RECORDED = Path(__file__).parent / "recorded"
KEY = "tenant s"
"""The key of the session that earlier versions stored as "s", the client's name for it."""
MODEL = ModelFingerprint("tokenizer", "weights", "template")

Place = Callable[[], SessionStore]


def sqlite_log(path: Path) -> Path:
    """Makes a file with the recorded content of layout 2."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((RECORDED / "sqlite_layout_2.sql").read_text())
    return path


def redis_log(server: RedisServer, name: str) -> None:
    """Writes the recorded keys of layout 1 to Redis, under another log name."""
    keys = json.loads((RECORDED / "redis_layout_1.json").read_text())
    with server.client() as client:
        for recorded, (kind, value) in keys.items():
            key = recorded.replace("{recorded}", f"{{{name}}}")
            match kind:
                case "string":
                    client.set(key, base64.b64decode(value))
                case "set":
                    client.sadd(key, *map(base64.b64decode, value))
                case "hash":
                    client.hset(key, mapping={at: base64.b64decode(each) for at, each in value.items()})


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Opens the log that the version before has written."""
    if request.param == "sqlite":
        path = sqlite_log(tmp_path / "sessions.db")
        return lambda: SqliteSessionStore(path)
    server: RedisServer = request.getfixturevalue("redis_server")
    log = server.log()
    redis_log(server, log.name)
    return lambda: RedisSessionStore(log, CLUSTER)


def as_it_was(server: RedisServer, name: str) -> None:
    """Turns the log back into one from before turns were stored one by one."""
    with server.client() as client:
        for key in client.keys(f"kedge:{{{name}}}:turns:*"):
            tokens = [turn[START_BYTES:] for _, turn in sorted(client.hgetall(key).items())]
            client.set(key.replace(b":turns:", b":history:"), b"".join(tokens))
            client.delete(key)


@pytest.fixture(params=["sqlite", "redis"])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Opens the same log each time. At first it is empty."""
    if request.param == "sqlite":
        return lambda: SqliteSessionStore(tmp_path / "new.db")
    server = request.getfixturevalue("redis_server")
    log = server.log()

    def opened() -> SessionStore:
        as_it_was(server, log.name)
        return RedisSessionStore(log, CLUSTER)

    return opened


def test_a_log_of_the_layout_before_is_read_and_gone_on_with(place: Place) -> None:
    store = place()
    record = replace(
        SESSION,
        session_id=KEY,
        tenant="tenant",
        history=encode_tokens([1, 2, 3, 4]),
        turns=2,
        results=(StoredResult("k", 0, b"r", "d"),),
        tools="tools",
    )
    assert store.find(KEY).last_used_s == 1000.0
    epoch = store.claim(KEY, "a").epoch  # it had no writer in Redis, so no cluster yet
    assert store.load(KEY) == replace(record, epoch=epoch)
    (entry,) = list(store.load_all_entries())
    assert (entry.session_id, entry.tokens, entry.turns) == (KEY, 4, 2)
    told_again = turn_of(1, 3, [4], input_len=1, epoch=epoch)
    for turn in (told_again, turn_of(2, 4, [5], model=MODEL, epoch=epoch)):
        append_turn(store, replace(turn, session_id=KEY))
    store.disconnect()
    again = place()  # raised to this layout: an older version would misread it
    assert (history_of(again, KEY), again.load(KEY).model) == ([1, 2, 3, 4, 5], MODEL)
    with pytest.raises(SessionNotFound):
        again.load("s")
    assert again.open(replace(SESSION, session_id="new")).epoch == 2, "above the session that was closed"
    again.disconnect()


def test_tokens_that_a_version_before_has_written_are_rewound_to_the_last(
    redis_server: RedisServer,
) -> None:
    """In Redis they are one text for all turns, and a rewind used to leave it as it was."""
    log = redis_server.log()
    redis_log(redis_server, log.name)
    store = RedisSessionStore(log, CLUSTER)
    epoch = store.claim(KEY, "a").epoch
    append_turn(store, turn_of(2, 4, [5, 6], epoch=epoch, session_id=KEY))
    append_turn(store, turn_of(3, 2, [7], epoch=epoch, session_id=KEY))
    assert history_of(store, KEY) == [1, 2, 7]
    with redis_server.client() as client:
        assert client.get(f"kedge:{{{log.name}}}:history:{KEY}") == encode_tokens([1, 2])
    store.disconnect()


def test_a_cluster_finds_its_tenants_sessions_of_the_version_before(reopened: Place) -> None:
    store = reopened()
    store.open(replace(SESSION, tenant="tenant"))
    append_turn(store, turn_of(0, 0, [1, 2]))
    store.disconnect()
    for _ in range(2):
        store = reopened()
        assert [entry.session_id for entry in list(store.load_all_entries())] == [KEY]
        assert history_of(store, KEY) == [1, 2]
        store.disconnect()


def test_a_file_of_the_first_layout_gains_what_is_new(tmp_path: Path) -> None:
    path = sqlite_log(tmp_path / "sessions.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE sessions DROP COLUMN tools")
        connection.execute("PRAGMA user_version = 1")
    for _ in range(2):
        store = SqliteSessionStore(path)
        record = store.load(KEY)
        assert (history_of(store, KEY), record.tools, record.model) == ([1, 2, 3, 4], None, None)
        store.disconnect()


def test_a_newer_layout_is_refused_by_name_and_left_alone(tmp_path: Path, redis_server: RedisServer) -> None:
    path = tmp_path / "sessions.db"
    SqliteSessionStore(path).disconnect()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA user_version = 7")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"has layout 7; this version of Kedge reads layouts up to 6"):
        SqliteSessionStore(path)
    assert path.read_bytes() == before

    log = redis_server.log()
    RedisSessionStore(log, CLUSTER).disconnect()
    with redis_server.client() as client:
        client.set(f"kedge:{{{log.name}}}:layout", "3")
        with pytest.raises(StoreError, match=r"has layout b'3'; this version of Kedge reads layouts up to 2"):
            RedisSessionStore(log, CLUSTER)
        assert client.get(f"kedge:{{{log.name}}}:layout") == b"3"


@pytest.fixture
def store(reopened: Place) -> SessionStore:
    return reopened()


def test_the_model_of_a_session_is_that_of_its_last_turn(store: SessionStore) -> None:
    other = replace(MODEL, weights="other", template=None)
    store.open(SESSION)
    assert store.load("s").model is None
    append_turn(store, turn_of(0, 0, [1, 2, 3], model=MODEL))
    assert store.load("s").model == MODEL
    append_turn(store, turn_of(1, 3, [4], model=other))
    assert store.load("s").model == other
    append_turn(store, turn_of(2, 4, [5]))
    assert store.load("s").model == other, "a replica of the version before does not tell"
    store.fork("s", 2, replace(SESSION, session_id="child"))
    assert store.load("child").model == other
    append_turn(store, turn_of(3, 0, [6]))
    assert store.load("s").model is None, "begun anew by one that does not tell"
    store.disconnect()
