"""Relative paths of written files lead to the same place for every version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from serving.settings.config import main, parse_args
from serving.settings.settings_paths import project_root, state_path, state_root
from serving.settings.strict_settings import SettingsError

PACKAGES = ("cache", "controllers", "engine", "serving")
ASK = (
    "from serving.settings.config import parse_args;"
    "print(parse_args({'model': {'path': 'any-org/any-model'}}).controller.log_settings().path)"
)


def path_of_the_log(packages: Path, home: Path) -> Path:
    """Where the code in `packages` puts the log for a config without a state_dir."""
    environment = os.environ | {"PYTHONPATH": str(packages), "HOME": str(home)}
    environment.pop("KEDGE_HOME", None)
    run = subprocess.run(
        [sys.executable, "-c", ASK], cwd=packages, env=environment, check=True, capture_output=True, text=True
    )
    return Path(run.stdout.strip())


def copied(to: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(project_root() / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def test_the_log_of_an_installed_package_is_not_in_its_folder(tmp_path: Path) -> None:
    """The next version is installed in the place of this one or beside it. The sessions used to be gone then."""
    packages = copied(tmp_path / "lib" / "python3" / "site-packages")
    assert path_of_the_log(packages, tmp_path / "home") == tmp_path / "home" / ".kedge" / "sessions.sqlite3"


def test_the_log_of_what_ray_uploaded_is_not_in_the_upload(tmp_path: Path) -> None:
    """Ray makes a folder for each uploaded content and deletes it later. An upload may be a whole repository, with its
    pyproject.toml."""
    upload = tmp_path / "ray" / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    packages = copied(upload)
    shutil.copy(project_root() / "pyproject.toml", packages)
    assert path_of_the_log(packages, tmp_path / "home") == tmp_path / "home" / ".kedge" / "sessions.sqlite3"


def test_a_checkout_keeps_its_state_beside_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KEDGE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert state_path(".kedge", "a.setting") == project_root() / ".kedge"
    assert state_path(str(tmp_path), "a.setting") == tmp_path
    assert state_path("~/kedge", "a.setting") == Path.home() / "kedge"


def test_a_home_that_nobody_knows_is_the_settings_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback: RuntimeError, from pathlib."""
    config = tmp_path / "cluster.yaml"
    args = {"model": {"path": "any-org/any-model"}, "controller": {"state_dir": "~nosuchuser/x"}}
    config.write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    assert main([str(config)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{config}: args.controller.state_dir: '~nosuchuser/x' leads nowhere: ")


def test_a_home_that_nobody_knows_is_named_on_a_replica() -> None:
    """Its folders are its own machine's, so only the replica can tell."""
    args = {"model": {"path": "a/b"}, "cache": {"disk_mib": 1, "disk_path": "~nosuchuser/x"}}
    with pytest.raises(SettingsError, match=r"^cache\.disk_path: '~nosuchuser/x' leads nowhere"):
        parse_args(args).engine_settings()


def test_kedge_home_counts_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEDGE_HOME", str(tmp_path))
    assert state_path(".kedge", "a.setting") == tmp_path / ".kedge"
    assert state_path("/else/where", "a.setting") == Path("/else/where")
    with pytest.raises(SettingsError, match="KEDGE_HOME has to be an absolute path, not 'here'"):
        state_root(project_root(), {"KEDGE_HOME": "here"})
