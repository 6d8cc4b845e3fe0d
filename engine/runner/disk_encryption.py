"""KV in files that only this process can read."""

from __future__ import annotations

import secrets
from typing import BinaryIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.runner.disk_format import Mark

KEY_BITS = 256
NONCE_BYTES = 12
TAG_BYTES = 16


class Encrypted:
    """AES-256-GCM under a key that only this process has. The key is lost when the process ends, so nobody can read
    what it leaves."""

    def __init__(self) -> None:
        self._key = AESGCM(AESGCM.generate_key(KEY_BITS))

    def write(self, file: BinaryIO, data: memoryview) -> Mark:
        nonce = secrets.token_bytes(NONCE_BYTES)
        file.write(self._key.encrypt(nonce, data, None))
        return nonce

    def read(self, file: BinaryIO, data: memoryview, mark: Mark) -> bool:
        assert isinstance(mark, bytes)
        stored = file.read(len(data) + TAG_BYTES)
        if len(stored) < len(data) + TAG_BYTES:
            return False  # decrypt_into would say that `data` has the wrong size
        try:
            self._key.decrypt_into(mark, stored, None, data)
        except InvalidTag:
            return False
        return True
