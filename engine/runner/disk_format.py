"""How KV is stored in a file: as it is, with a checksum that the process keeps, or encrypted (disk_encryption.py)."""

from __future__ import annotations

import zlib
from typing import BinaryIO, Protocol

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
