"""KV in files: each key's tensors one after another, as they lie in memory.

Nothing is flushed to the disk itself: the files are of no use to anybody once the process has ended.
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
    """Owns the files in `folder`, by key. One thread writes and removes, one reads, never the same key at a time."""

    def __init__(self, folder: DiskFolder, form: DiskFormat) -> None:
        self._folder = folder
        self._form = form
        self._marks: dict[int, list[Mark]] = {}
        self._stopped = False

    def __contains__(self, key: int) -> bool:
        """Whether a write of `key` has succeeded. Any thread."""
        return key in self._marks

    @property
    def path(self) -> str:
        return str(self._folder.path)

    def write(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Of tensors in host memory. Raises OSError, and leaves nothing then."""
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
        """Fills `blanks`, of the shapes that were written, one after another. Raises OSError."""
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
        """A write that runs fails soon, as do those after it. Any thread."""
        self._stopped = True

    def close(self) -> None:
        """Removes all files. No other thread may be in here any more."""
        self._marks.clear()
        self._folder.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type."""
    return tensor.view(-1).view(torch.uint8).numpy().data
