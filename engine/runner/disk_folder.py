"""The folder for a replica's KV on disk. Several replicas may share the folder of the settings."""

from __future__ import annotations

from pathlib import Path

from engine.owned_folder import OwnedFolder

PREFIX = "kedge-kv-"
SUFFIX = ".kv"


class DiskUnavailable(RuntimeError):
    """KV cannot be kept inside the folder of the settings."""


class DiskFolder(OwnedFolder):
    """An OwnedFolder inside `root`. Raises DiskUnavailable."""

    def __init__(self, root: Path) -> None:
        try:
            super().__init__(root, PREFIX, SUFFIX)
        except OSError as error:
            raise DiskUnavailable(f"cannot keep KV on disk in {root} (cache.disk_path): {error}") from error
