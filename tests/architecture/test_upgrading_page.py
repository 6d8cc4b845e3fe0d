"""docs/upgrading.md has the version numbers of this version."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

from controllers.session_log import redis_log, sqlite_schema
from controllers.settings import SqliteLogSettings
from controllers.wire_record import WIRE_VERSION

FIRST_SPOKEN = 3
"""Before this wire version front ends and replicas had other connections."""
PAGE = (ROOT / "docs" / "upgrading.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ray() -> str:
    """The minor version of Ray that pyproject.toml asks for."""
    (asked,) = (text for text in PROJECT["dependencies"] if text.startswith("ray["))
    return re.findall(r">=(\d+\.\d+)", asked)[0]


def test_the_newest_row_is_this_version() -> None:
    newest, oldest = sqlite_schema._SCHEMA_VERSION, min(sqlite_schema._READABLE)
    in_redis = [int(layout) for layout in redis_log.READABLE]
    spoken = f"{max(FIRST_SPOKEN, WIRE_VERSION - 1)} to {WIRE_VERSION + 1}"
    row = (
        f"| {PROJECT['version']} | {WIRE_VERSION}, speaks with {spoken} "
        f"| layout {newest}, reads {oldest} to {newest} "
        f"| layout {int(redis_log.LAYOUT)}, reads {min(in_redis)} to {max(in_redis)} | {ray()} |"
    )
    assert row in PAGE


def test_every_layout_is_explained() -> None:
    explained = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(layout) for layout in explained] == list(sqlite_schema._READABLE)


@pytest.mark.parametrize("shards", [1, 2, 64])
def test_a_copy_of_the_log_has_the_files_of_all_shards(shards: int, tmp_path: Path) -> None:
    """The page copied `sessions.sqlite3`, which is not there with several shards."""
    folder = tmp_path / ".kedge"
    folder.mkdir()
    files = [
        Path(SqliteLogSettings(str(folder / "sessions.sqlite3"), shards=shards, shard=shard).file)
        for shard in range(shards)
    ]
    for file in (*files, *(file.with_name(f"{file.name}-wal") for file in files)):
        file.touch()
    section = PAGE.partition("\n## A copy of the log\n")[2]
    commands = re.findall(r"^\$ (.*)", section, re.MULTILINE)
    subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=tmp_path, check=True)
    (copy,) = set(tmp_path.iterdir()) - {folder}
    assert {file.name for file in copy.iterdir()} == {file.name for file in folder.iterdir()}
