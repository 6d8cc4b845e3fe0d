"""KV in files: each key's tensors one after another, as they lie in memory.

Writes are not synced to the disk: the files are useless once the process has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.runner.disk_folder import DiskFolder
from engine.runner.disk_format import DiskFormat, Mark


class DiskFault(OSError):
    """A file does not hold what was written to it, or nothing more may be written."""


class DiskStore:
    """Owns the files in `folder`, by key. One thread writes and removes, another reads; they never use the same key at
    once."""

    def __init__(self, folder: DiskFolder, form: DiskFormat) -> None:
        self._folder = folder
        self._form = form
        self._marks: dict[int, list[Mark]] = {}
        self._stopped = False

    def __contains__(self, key: int) -> bool:
        """Whether `key` has been written. Any thread."""
        return key in self._marks

    @property
    def path(self) -> str:
        return str(self._folder.path)

    def write(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Writes tensors in host memory. Raises OSError, and then leaves nothing."""
        path = self._folder.file(str(key))
        marks = []
        try:
            with path.open("xb") as file:
                for tensor in tensors:
                    if self._stopped:
                        raise DiskFault("the store is closing")
                    marks.append(self._form.write(file, _bytes_of(tensor)))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._marks[key] = marks

    def read(self, key: int, blanks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Fills `blanks`, one after another; they must have the shapes that were written. Raises OSError."""
        path = self._folder.file(str(key))
        with path.open("rb") as file:
            for blank, mark in zip(blanks, self._marks[key], strict=True):
                if not self._form.read(file, _bytes_of(blank), mark):
                    raise DiskFault(f"{path} does not hold what was written to it")
                yield blank

    def remove(self, key: int) -> None:
        del self._marks[key]
        self._folder.file(str(key)).unlink(missing_ok=True)

    def stop(self) -> None:
        """Makes a running write, and all later ones, fail soon. Any thread."""
        self._stopped = True

    def close(self) -> None:
        """Removes all files. No other thread may use the store any more."""
        self._marks.clear()
        self._folder.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type."""
    return tensor.view(-1).view(torch.uint8).numpy().data
