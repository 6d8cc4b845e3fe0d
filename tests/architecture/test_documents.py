"""Links and paths that the documents name lead somewhere."""

from __future__ import annotations

import re

import pytest
from source_tree import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@every_document
def test_relative_links_resolve(path):
    targets = re.findall(r"\]\(([^)#\s]+)\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not missing


@every_document
def test_code_fences_are_closed(path):
    assert sum(line.startswith("```") for line in path.read_text().splitlines()) % 2 == 0
