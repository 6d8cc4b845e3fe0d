"""Keys: which ones are valid, whose they are, and where they are read from.

They come from the environment, because Ray logs settings, or from a file that has only their hashes and may change
while the server runs. Keys are long and random, so they cannot be guessed from a plain SHA-256. They are looked up by
hash: the time that this takes does not tell how much of a wrong key was right.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import yaml
from pydantic import Field, ValidationError, model_validator

from serving.settings.strict_settings import Name, SettingsError, StrictModel, faults

API_KEYS = "KEDGE_API_KEYS"
"""The ingress's environment variable with the keys: `key` or `key=tenant`, separated by commas."""

OPERATOR_KEYS = "KEDGE_OPERATOR_KEYS"
"""Likewise for operators' keys, which have no tenant."""

KEYS_FILE_SETTING = "ingress.keys_file"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by its key. `tenant`: whose sessions the caller may use; None: the tenant that each call names. An
    `operator` may see and change what belongs to all tenants."""

    tenant: str | None = None
    operator: bool = False


ANYBODY = Caller(operator=True)
"""The caller if there are no keys."""

_Entry = tuple[bytes, Caller]


class KeyEntry(StrictModel):
    """One key of the file: the SHA-256 of its bytes, and whose it is."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tenant: Name | None = None
    operator: bool = False

    @model_validator(mode="after")
    def _operators_are_of_no_tenant(self) -> KeyEntry:
        if self.operator and self.tenant is not None:
            raise ValueError("an operator's key is of no tenant: leave one of the two out")
        return self


class KeysFile(StrictModel):
    """What the file may say."""

    keys: tuple[KeyEntry, ...] = Field(min_length=1, strict=False)


class KeyRing:
    """All keys that are valid now. `reload` reads those of the file again; only one task at a time may call it."""

    def __init__(self, environment: Mapping[str, str], path: str | None = None) -> None:
        """Raises SettingsError for a variable that is set but has no key in it, a file that cannot be used, and a key
        that is given twice: an operator who configures keys wants other calls refused."""
        self._given = [*_keys_in(environment, API_KEYS), *_keys_in(environment, OPERATOR_KEYS)]
        self._path = path
        self._seen = _look(path)
        self._callers = self._read()

    def __bool__(self) -> bool:
        """Whether calls need a key."""
        return bool(self._callers)

    def caller(self, key: bytes) -> Caller | None:
        """Whose key it is; None if it is not valid."""
        return self._callers.get(hashlib.sha256(key).digest())

    def reload(self) -> None:
        """Reads the file if it has changed. If it cannot be used, the keys stay as they are."""
        seen = _look(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._callers = self._read()
        except SettingsError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("%s: %d keys are valid now", KEYS_FILE_SETTING, len(self._callers))

    def _read(self) -> dict[bytes, Caller]:
        callers: dict[bytes, Caller] = {}
        for digest, caller in (*self._given, *_keys_of_file(self._path)):
            if digest in callers:
                raise SettingsError(
                    f"a key is there twice, in {API_KEYS}, {OPERATOR_KEYS} or {KEYS_FILE_SETTING}"
                )
            callers[digest] = caller
        return callers


def _keys_in(environment: Mapping[str, str], variable: str) -> Iterator[_Entry]:
    value = environment.get(variable)
    if value is None:
        return
    words = [word for part in value.split(",") if (word := part.strip())]
    if not words:
        raise SettingsError(
            f"{variable} is set but has no key in it: give at least one key (commas part them), or leave the "
            "variable unset"
        )
    for number, word in enumerate(words, 1):
        operator = variable == OPERATOR_KEYS
        key, tenant = (word, None) if operator else _parted(word)
        try:
            entry = KeyEntry(
                sha256=hashlib.sha256(key.encode()).hexdigest(), tenant=tenant, operator=operator
            )
        except ValidationError as error:
            raise SettingsError("; ".join(faults(error, f"{variable}[{number}]"))) from None
        yield _entry(entry)


def _parted(word: str) -> tuple[str, str | None]:
    """Splits `key=tenant`. A word that ends in = is a key alone, as base64 may end so."""
    key, _, tenant = word.rpartition("=")
    return (key, tenant) if key and tenant else (word, None)


def _keys_of_file(path: str | None) -> Iterable[_Entry]:
    if path is None:
        return ()
    try:
        with open(path, encoding="utf-8") as file:
            entries = KeysFile.model_validate(yaml.safe_load(file)).keys
    except ValidationError as error:
        raise SettingsError("; ".join(faults(error, f"{KEYS_FILE_SETTING} {path}"))) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{KEYS_FILE_SETTING}: {path} cannot be read: {error}") from None
    return map(_entry, entries)


def _entry(entry: KeyEntry) -> _Entry:
    return bytes.fromhex(entry.sha256), Caller(entry.tenant, entry.operator)


def _look(path: str | None) -> tuple[int, ...]:
    """A value that changes whenever the file does; empty if there is no file."""
    if path is None:
        return ()
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
