"""What an encrypted session log accepts and what it refuses."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.errors import StoreError
from controllers.open_store import open_store
from controllers.session_log.log_cipher import KEY_BYTES, MARK, LogCipher
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import LOG_KEYS, SqliteLogSettings

FIRST, SECOND = bytes(KEY_BYTES), b"2" * KEY_BYTES


def text(*keys: bytes) -> str:
    return ",".join(base64.b64encode(key).decode() for key in keys)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(LOG_KEYS, raising=False)
    return monkeypatch


def test_a_value_comes_back_at_its_place_only() -> None:
    cipher = LogCipher([FIRST], encrypts=True)
    stored = cipher.encrypt(b"value", "here")
    assert stored.startswith(MARK)
    assert b"value" not in stored
    assert stored != cipher.encrypt(b"value", "here")
    assert cipher.decrypt(stored, "here") == b"value"
    for value, place in (
        (stored, "there"),
        (stored[:-1] + bytes([stored[-1] ^ 1]), "here"),
        (stored[:20], "here"),
    ):
        with pytest.raises(StoreError, match="is not what was written there"):
            cipher.decrypt(value, place)


def test_keys_change_one_after_another() -> None:
    old = LogCipher.parse(text(FIRST), encrypts=True).encrypt(b"old", "p")
    both = LogCipher.parse(f" {text(SECOND, FIRST)} ,", encrypts=True)
    new = both.encrypt(b"new", "p")
    assert (both.decrypt(old, "p"), both.decrypt(new, "p")) == (b"old", b"new")
    only_new = LogCipher.parse(text(SECOND), encrypts=True)
    assert only_new.decrypt(new, "p") == b"new"
    with pytest.raises(StoreError, match=f"p is encrypted under a key that {LOG_KEYS} does not have"):
        only_new.decrypt(old, "p")


@pytest.mark.parametrize("keys", ["nonsense", "c2hvcnQ=", text(FIRST) + ",x", text(FIRST + b"x")])
def test_keys_that_are_none_are_refused_and_not_told(keys: str) -> None:
    with pytest.raises(StoreError, match=f"{LOG_KEYS}: each key must be 32 random bytes as base64") as caught:
        LogCipher.parse(keys, encrypts=False)
    assert keys not in caught.value.message


def test_an_encrypted_log_without_a_key_does_not_open(path: Path, environment: pytest.MonkeyPatch) -> None:
    settings = SqliteLogSettings(str(path), encrypted=True)
    for keys in (None, "", " , "):
        if keys is not None:
            environment.setenv(LOG_KEYS, keys)
        with pytest.raises(
            StoreError, match=r"controller.encrypted: the environment variable KEDGE_LOG_KEYS"
        ):
            open_store(settings, "cluster", lambda: 0.0)
    assert not path.exists()


def test_encryption_can_be_turned_on_and_off(path: Path, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(LOG_KEYS, text(os.urandom(KEY_BYTES)))
    tokens: list[int] = []
    for number, encrypted in enumerate((False, True, False)):
        store = open_store(SqliteLogSettings(str(path), encrypted=encrypted), "cluster", lambda: 0.0)
        if not number:
            store.open(SESSION)
        append_turn(store, turn_of(number, len(tokens), [number]))
        tokens.append(number)
        assert history_of(store) == tokens
        store.disconnect()
    environment.delenv(LOG_KEYS)
    store = SqliteSessionStore(path)
    with pytest.raises(StoreError, match="is encrypted under a key"):
        store.load("s")
    assert [entry.session_id for entry in list(store.load_all_entries())] == ["s"]
    store.disconnect()
