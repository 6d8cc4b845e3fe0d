"""Where the paths of the settings lead."""

from __future__ import annotations

import os
from pathlib import Path


def project_root() -> Path:
    """The directory that relative paths of the settings start from."""
    return Path(__file__).resolve().parents[2]


def resolve_path(path: str) -> str:
    """Absolute path of a file below the project or the working directory; a hub id stays as it is."""
    given = Path(os.path.expanduser(path))
    for root in (project_root(), Path.cwd()):
        if (root / given).exists():
            return str((root / given).resolve())
    return path


def state_path(state_dir: str) -> Path:
    """Absolute path of a directory that is written to; relative ones start at the project."""
    return (project_root() / Path(state_dir).expanduser()).resolve()
