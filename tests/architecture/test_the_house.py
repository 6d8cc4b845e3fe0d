"""docs/architecture.md lists exactly the files that the product has."""

from __future__ import annotations

import re

import pytest
from source_tree import PACKAGES, ROOT

FILE = re.compile(r"`([\w/]+\.py)`")


def section(package: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text()
    return re.split(r"^##", text.split(f"\n### {package}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_has_its_line(package: str) -> None:
    listed = {path.rsplit("/", 1)[-1] for path in FILE.findall(section(package))}
    there = {path.name for path in (ROOT / package).rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert there - listed == set(), "files that the page does not list"
    assert listed - there == set(), "files that are not there"
