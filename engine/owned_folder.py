"""A folder that belongs to one process while it lives, inside a folder that several processes share.

A process that makes or clears away a folder holds the lock of the shared folder meanwhile. The owner also holds its own
folder's lock, from within that time until it ends, however it ends. So, under the shared lock, a folder whose lock is
free is the leftover of a dead process; that of a living process cannot be mistaken for one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LOCK = "lock"
LOCK_WAIT_S = 30.0
LOCK_POLL_S = 0.02

_logger = logging.getLogger("kedge.engine")


class OwnedFolder:
    """Owns the folder `path`, whose name begins with `prefix`. The caller makes the files in it. Their names end in
    `suffix`."""

    def __init__(self, root: Path, prefix: str, suffix: str) -> None:
        """Makes `root` if needed, and clears away what dead processes left in it under the same prefix. Raises
        OSError."""
        self._suffix = suffix
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(root, prefix):
            _clear_leftovers(root, prefix, suffix)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            self._lock = _open_lock(self.path / LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def file(self, name: str) -> Path:
        return self.path / f"{name}{self._suffix}"

    def close(self) -> None:
        """Removes the folder. It stays locked until it is gone."""
        _remove(self.path, self._suffix)
        self._lock.close()


@contextmanager
def locked(root: Path, prefix: str) -> Iterator[None]:
    """Holds the lock of the shared folder, for this prefix. Raises TimeoutError, which is an OSError."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    with _open_lock(root / f"{prefix}{LOCK}") as lock:
        while not _try_lock(lock):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process has been making its folder there for {LOCK_WAIT_S} s")
            time.sleep(LOCK_POLL_S)
        yield


def _open_lock(path: Path, flags: int = os.O_CREAT) -> IO[str]:
    """Opens a lock file without following a link or emptying it: where others may write to the shared folder, the name
    may belong to a file that is not ours. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), "r+")


def _clear_leftovers(root: Path, prefix: str, suffix: str) -> None:
    """Removes leftovers of this user only. Other users' folders, and links to folders, are left alone."""
    for folder in root.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with _open_lock(folder / LOCK, flags=0) as lock:
                if not _try_lock(lock):
                    continue  # its owner lives
                _remove(folder, suffix)
        except FileNotFoundError:  # its owner died before it had locked it, or while it removed it
            _remove_empty(folder)
        except OSError as error:
            _logger.warning("leftovers in %s stay: %s", folder, error)


def _remove(folder: Path, suffix: str) -> None:
    """Removes what this module's owners put there, and the folder if it is then empty."""
    try:
        for file in folder.glob(f"*{suffix}"):
            file.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("%s could not be removed: %s", folder, error)
    else:
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    """A folder without a lock that is not empty stays: programs that tidy up /tmp take a lock from a living owner."""
    with suppress(FileNotFoundError):  # another process has removed it
        try:
            folder.rmdir()
        except OSError as error:
            _logger.warning("%s could not be removed: %s", folder, error)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
