"""How KV is stored in a file: as it is, with a checksum that the process keeps, or encrypted under a key of the
process."""

from __future__ import annotations

import secrets
import zlib
from typing import BinaryIO, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BITS = 256
NONCE_BYTES = 12
TAG_BYTES = 16

Mark = int | bytes
"""What the process must remember of a piece of a file to read it."""


class DiskFormat(Protocol):
    """Pieces of a file are read in the order in which they were written."""

    def write(self, file: BinaryIO, data: memoryview) -> Mark:
        """Raises OSError."""

    def read(self, file: BinaryIO, data: memoryview, mark: Mark) -> bool:
        """Fills `data`. False if the file does not hold what was written. Raises OSError."""


class Checked:
    def write(self, file: BinaryIO, data: memoryview) -> Mark:
        file.write(data)
        return zlib.crc32(data)

    def read(self, file: BinaryIO, data: memoryview, mark: Mark) -> bool:
        return file.readinto(data) == len(data) and zlib.crc32(data) == mark  # type: ignore[attr-defined]


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
        try:
            self._key.decrypt_into(mark, file.read(len(data) + TAG_BYTES), None, data)
        except InvalidTag:
            return False
        return True
