"""Encrypts the session log's values at rest: AES-256-GCM of the `cryptography` package, with the operator's keys.

An encrypted value names its key and is bound to its place in the log: a value that was changed, or moved to another
place, is refused. Values that are not encrypted are read as they are. So encryption can be turned on and off for a log
that has sessions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from controllers.errors import StoreError
from controllers.settings import LOG_KEYS

KEY_BYTES = 32
MARK = b"\x93KDGLOG\x01"
"""The beginning of every encrypted value. Nothing else in the log begins so: it is neither JSON nor a token id of any
vocabulary."""
KEY_ID_BYTES = 4
NONCE_BYTES = 12


class LogCipher:
    """Encrypts with the first of `keys` if `encrypts`, and decrypts with any of them."""

    def __init__(self, keys: Sequence[bytes] = (), *, encrypts: bool = False) -> None:
        self._by_id = {_key_id(key): AESGCM(key) for key in keys}
        self._first = _key_id(keys[0]) if encrypts else None

    @classmethod
    def parse(cls, keys: str, *, encrypts: bool) -> LogCipher:
        """A cipher with these keys, in base64 and separated by commas. Raises StoreError."""
        parsed = [_parse(key.strip()) for key in keys.split(",") if key.strip()]
        if encrypts and not parsed:
            raise StoreError(
                f"controller.encrypted: the environment variable {LOG_KEYS} of the controller's process must have "
                f"a key: {KEY_BYTES} random bytes as base64",
                LOG_KEYS,
            )
        return cls(parsed, encrypts=encrypts)

    def encrypt(self, value: bytes, place: str) -> bytes:
        """Encrypts a value. `place` is where in the log it is. No two values have the same place at a time."""
        if self._first is None:
            return value
        nonce = secrets.token_bytes(NONCE_BYTES)
        return MARK + self._first + nonce + self._by_id[self._first].encrypt(nonce, value, place.encode())

    def decrypt(self, stored: bytes, place: str) -> bytes:
        """Decrypts a value. Raises StoreError if its key is not known, or if it was changed or moved."""
        if not stored.startswith(MARK):
            return stored
        at = len(MARK)
        key_id, nonce = stored[at : at + KEY_ID_BYTES], stored[at + KEY_ID_BYTES :][:NONCE_BYTES]
        key = self._by_id.get(key_id)
        if key is None:
            raise StoreError(f"session log: {place} is encrypted under a key that {LOG_KEYS} does not have")
        try:
            return key.decrypt(nonce, stored[at + KEY_ID_BYTES + NONCE_BYTES :], place.encode())
        except InvalidTag:
            raise StoreError(f"session log: {place} is not what was written there") from None


def _parse(key: str) -> bytes:
    try:
        found = base64.b64decode(key, validate=True)
    except binascii.Error:
        found = b""
    if len(found) != KEY_BYTES:
        raise StoreError(f"{LOG_KEYS}: each key must be {KEY_BYTES} random bytes as base64", LOG_KEYS)
    return found


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=KEY_ID_BYTES, person=b"kedge log key").digest()
