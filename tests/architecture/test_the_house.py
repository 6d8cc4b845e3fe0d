"""docs/architecture.md lists exactly the folders of code that the product has, and exactly the pages on its design."""

from __future__ import annotations

import re

import pytest
from source_tree import PACKAGES, ROOT, sources

PAGE = (ROOT / "docs" / "architecture.md").read_text()
FOLDER = re.compile(r"^\| `([\w/]+)` \|", re.MULTILINE)
"""Begins a folder's row in the table."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_has_its_line(package: str) -> None:
    listed = {folder for folder in FOLDER.findall(PAGE) if folder.split("/")[0] == package}
    there = {source.name.rsplit("/", 1)[0] for source in sources(package)}
    assert there - listed == set(), "folders that the page does not list"
    assert listed - there == set(), "folders that are not there"


def test_every_page_on_the_design_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(design/([\w-]+\.md)", PAGE))
    assert linked == {path.name for path in (ROOT / "docs" / "design").glob("*.md")}
