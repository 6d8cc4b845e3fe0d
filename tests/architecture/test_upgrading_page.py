"""docs/upgrading.md has the version numbers of this version."""

from __future__ import annotations

import re
import tomllib

from source_tree import ROOT

from controllers import redis_log, sqlite_schema
from controllers.wire_record import WIRE_VERSION

PAGE = (ROOT / "docs" / "upgrading.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ray() -> str:
    """The minor version of Ray that pyproject.toml asks for."""
    (asked,) = (text for text in PROJECT["dependencies"] if text.startswith("ray["))
    return re.findall(r">=(\d+\.\d+)", asked)[0]


def test_the_newest_row_is_this_version() -> None:
    newest, oldest = sqlite_schema._SCHEMA_VERSION, min(sqlite_schema._READABLE)
    in_redis = [int(layout) for layout in redis_log.READABLE]
    row = (
        f"| {PROJECT['version']} | {WIRE_VERSION}, speaks with {WIRE_VERSION - 1} to {WIRE_VERSION + 1} "
        f"| layout {newest}, reads {oldest} to {newest} "
        f"| layout {int(redis_log.LAYOUT)}, reads {min(in_redis)} to {max(in_redis)} | {ray()} |"
    )
    assert row in PAGE


def test_every_layout_is_explained() -> None:
    explained = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(layout) for layout in explained] == list(sqlite_schema._READABLE)
