"""No committed file names a path of the machine where it was written."""

from __future__ import annotations

import re

from source_tree import ROOT, tracked_files

MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:home|root|Users|work|workspace|scratch)/[\w.-]+")
TEXT_SUFFIXES = {
    ".py", ".md", ".toml", ".yaml", ".yml", ".lock", ".cfg", ".ini", ".txt", ".json", ".sh", ".jinja", ""
}  # fmt: skip


def test_no_committed_path_of_a_machine() -> None:
    found = []
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES or path == ROOT / "tests/architecture/test_no_machine.py":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found
