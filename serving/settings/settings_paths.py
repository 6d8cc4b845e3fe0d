"""Where the paths of the settings lead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from serving.settings.strict_settings import SettingsError

KEDGE_HOME = "KEDGE_HOME"
"""The environment variable with the directory that relative paths of what is written start from."""

_RAY_UPLOADS = "runtime_resources"
"""Ray's folder of uploaded working directories and packages: one folder for each version, deleted when unused."""


def project_root() -> Path:
    """The directory that Kedge's packages lie in; relative paths of what is read start from it."""
    return Path(__file__).resolve().parents[2]


def resolve_path(path: str) -> str:
    """Absolute path of a file below the project or the working directory; a hub id stays as it is."""
    given = Path(os.path.expanduser(path))
    for root in (project_root(), Path.cwd()):
        if (root / given).exists():
            return str((root / given).resolve())
    return path


def state_path(directory: str, setting: str) -> Path:
    """Absolute path of a directory that is written to; relative ones start at `state_root`. Raises SettingsError, which
    names the `setting`, if the path begins at a home directory that nobody knows here."""
    try:
        root = state_root(project_root(), os.environ)
        return (root / Path(directory).expanduser()).resolve()
    except RuntimeError as error:  # pathlib's, for `~nobody` and for a user without a home
        raise SettingsError(f"{setting}: {directory!r} leads nowhere: {error}") from error


def state_root(package_root: Path, environment: Mapping[str, str]) -> Path:
    """$KEDGE_HOME; without it a checkout of the repository, which stays where it is from version to version; where
    Kedge is installed as a package, or was uploaded by Ray, the home directory.

    Raises SettingsError for a $KEDGE_HOME that is relative itself.
    """
    if home := environment.get(KEDGE_HOME):
        if not Path(home).is_absolute():
            raise SettingsError(
                f"the environment variable {KEDGE_HOME} has to be an absolute path, not {home!r}"
            )
        return Path(home)
    checkout = (package_root / "pyproject.toml").is_file() and _RAY_UPLOADS not in package_root.parts
    return package_root if checkout else Path.home()
