"""KV in files: each key's tensors one after another, as they lie in memory, with a checksum of each kept here.

Nothing is flushed to the disk itself: the files are of no use to anybody once the process has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.runner.disk_folder import DiskFolder


class DiskFault(OSError):
    """A file does not hold what was written to it, or nothing more may be written."""


class DiskStore:
    """Owns the files in `folder`, by key. One thread writes and removes, one reads, never the same key at a time."""

    def __init__(self, folder: DiskFolder) -> None:
        self._folder = folder
        self._sums: dict[int, list[int]] = {}
        self._stopped = False

    def __contains__(self, key: int) -> bool:
        """Whether a write of `key` has succeeded. Any thread."""
        return key in self._sums

    @property
    def path(self) -> str:
        return str(self._folder.path)

    def write(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Of tensors in host memory. Raises OSError, and leaves nothing then."""
        path = self._folder.file(str(key))
        sums = []
        try:
            with path.open("xb") as file:
                for tensor in tensors:
                    if self._stopped:
                        raise DiskFault("the store is closing")
                    data = _bytes_of(tensor)
                    file.write(data)
                    sums.append(zlib.crc32(data))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._sums[key] = sums

    def read(self, key: int, blanks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Fills `blanks`, of the shapes that were written, one after another. Raises OSError."""
        path = self._folder.file(str(key))
        with path.open("rb") as file:
            for blank, expected in zip(blanks, self._sums[key], strict=True):
                data = _bytes_of(blank)
                if file.readinto(data) != len(data) or zlib.crc32(data) != expected:
                    raise DiskFault(f"{path} does not hold what was written to it")
                yield blank

    def remove(self, key: int) -> None:
        del self._sums[key]
        self._folder.file(str(key)).unlink(missing_ok=True)

    def stop(self) -> None:
        """A write that runs fails soon, as do those after it. Any thread."""
        self._stopped = True

    def close(self) -> None:
        """Removes all files. No other thread may be in here any more."""
        self._sums.clear()
        self._folder.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type."""
    return tensor.view(-1).view(torch.uint8).numpy().data
