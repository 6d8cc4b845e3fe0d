"""Where keys come from and whose they are. A file of keys may change while the server runs."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from serving.keys import API_KEYS, OPERATOR_KEYS, Caller, KeyRing
from serving.settings.strict_settings import SettingsError


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, *lines: str) -> None:
    """Replaces the file by another one, as an editor or a mounted secret does."""
    new = path.with_suffix(".new")
    new.write_text("keys:\n" + "".join(f"  - {line}\n" for line in lines))
    os.replace(new, path)


@pytest.mark.parametrize(
    ("text", "callers"),
    [
        ("a", {"a": Caller()}),
        (" a, b c ,", {"a": Caller(), "b c": Caller()}),
        ("a=acme,b=other", {"a": Caller("acme"), "b": Caller("other")}),
        ("YWJj==,YWJk==acme", {"YWJj==": Caller(), "YWJk=": Caller("acme")}),
        ("=", {"=": Caller()}),
    ],
)
def test_the_environment_has_keys_and_their_tenants(text: str, callers: dict[str, Caller]) -> None:
    ring = KeyRing({API_KEYS: text})
    assert ring
    assert {key: ring.caller(key.encode()) for key in callers} == callers
    assert ring.caller(b"another") is None


def test_operators_have_keys_of_their_own() -> None:
    ring = KeyRing({API_KEYS: "a", OPERATOR_KEYS: "o,p=q"})
    assert [ring.caller(key) for key in (b"a", b"o", b"p=q")] == [
        Caller(),
        Caller(operator=True),
        Caller(operator=True),
    ]


def test_without_any_nobody_needs_one() -> None:
    assert not KeyRing({})


@pytest.mark.parametrize("variable", [API_KEYS, OPERATOR_KEYS])
@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_list_of_keys_without_a_key_refuses_to_start(variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        KeyRing({variable: text})


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({API_KEYS: "secret-a,secret-a"}, "there twice"),
        ({API_KEYS: "secret-a", OPERATOR_KEYS: "secret-a"}, "there twice"),
        ({API_KEYS: "secret-b,secret-a=ac me"}, r"KEDGE_API_KEYS\[2\].tenant"),
    ],
)
def test_keys_that_cannot_be_are_refused_and_not_told(environment: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as refused:
        KeyRing(environment)
    assert "secret" not in str(refused.value)


def test_a_file_has_hashes_and_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(
        path,
        f"{{sha256: {hashed('a')}, tenant: acme}}",
        f"{{sha256: {hashed('b')}}}",
        f"{{sha256: {hashed('o')}, operator: true}}",
    )
    ring = KeyRing({API_KEYS: "environment's"}, str(path))
    expected = [Caller("acme"), Caller(), Caller(operator=True), Caller()]
    assert [ring.caller(key) for key in (b"a", b"b", b"o", b"environment's")] == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "keys"),
        ("keys: []", "keys"),
        ("keys:\n  - {sha256: 12ab}", "keys.0.sha256"),
        ("keys:\n  - the-key-itself", "keys.0: a mapping of keys to values was expected, not text"),
        (f"keys:\n  - {{sha256: {hashed('a')}, tenent: acme}}", "did you mean 'tenant'"),
        (f"keys:\n  - {{sha256: {hashed('a')}, tenant: acme, operator: true}}", "of no tenant"),
        ("keys: [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_refuses_to_start(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=rf"ingress.keys_file.*{named}"):
        KeyRing({}, str(path))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    write(path, f"{{sha256: {hashed('old')}}}")
    ring = KeyRing({}, str(path))
    write(path, f"{{sha256: {hashed('new')}, tenant: acme}}")
    ring.reload()
    assert (ring.caller(b"old"), ring.caller(b"new")) == (None, Caller("acme"))

    for broken in (lambda: write(path, "{sha256: 0}"), path.unlink):
        caplog.clear()
        broken()
        for _ in range(3):
            ring.reload()
        assert ring.caller(b"new") == Caller("acme"), "who had a key still has it, and nobody else"
        assert [record.levelno for record in caplog.records] == [logging.ERROR], "it is said once"
    write(path, f"{{sha256: {hashed('newest')}}}")
    ring.reload()
    assert (ring.caller(b"new"), ring.caller(b"newest")) == (None, Caller())
