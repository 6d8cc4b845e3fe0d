"""Links in the documents lead to files and headings that exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from source_tree import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *#*$")


def anchors(text: str) -> set[str]:
    """The anchors that a renderer makes of the headings: lower case, hyphens for spaces, no punctuation. A repeated
    anchor gets a number."""
    found: set[str] = set()
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        heading = None if fenced else HEADING.match(line)
        if heading is None:
            continue
        words = re.sub(r"\]\([^)]*\)", "", heading[1])
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = next(n for n in itertools.count() if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def leads_somewhere(document: Path, target: str) -> bool:
    """Whether a relative link of `document` names an existing file and, after `#`, a heading of that file."""
    path, _, anchor = target.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not anchor or anchor in anchors(file.read_text()))


@every_document
def test_relative_links_resolve(path):
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in targets if not leads_somewhere(path, target)] == []


def test_links_to_what_is_not_there_are_found(tmp_path):
    text = "# One `two`: three\n\n```\n# none\n```\n## Same\n## Same\n"
    (tmp_path / "other.md").write_text(text)
    document = tmp_path / "document.md"
    document.write_text("# Here\n")
    good = ("other.md", "other.md#one-two-three", "other.md#same", "other.md#same-1", "#here")
    bad = ("gone.md", "gone.md#here", "other.md#none", "other.md#same-2", "#one-two-three")
    assert [leads_somewhere(document, target) for target in good] == [True] * len(good)
    assert [leads_somewhere(document, target) for target in bad] == [False] * len(bad)


@every_document
def test_code_fences_are_closed(path):
    assert sum(line.startswith("```") for line in path.read_text().splitlines()) % 2 == 0
