"""Lines of the documents fit a screen. docs/wrap.py, which breaks them, changes nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt
from source_tree import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def wrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wrap", ROOT / "docs" / "wrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(text: str) -> list[str]:
    """The words and tags of the rendered page, without regard to where its lines end."""
    return MarkdownIt("commonmark").enable("table").render(text).split()


@every_document
def test_breaking_lines_changes_no_word(wrap: ModuleType, path: Path) -> None:
    text = path.read_text()
    assert rendered(wrap.wrapped(text)) == rendered(text)
    assert wrap.wrapped(wrap.wrapped(text)) == wrap.wrapped(text)


@every_document
def test_lines_fit_a_screen(wrap: ModuleType, path: Path) -> None:
    assert wrap.wrapped(path.read_text()) == path.read_text(), "python docs/wrap.py breaks its lines"


def test_what_has_to_stay_as_it_is_does(wrap: ModuleType) -> None:
    long = "word " * 40
    kept = f"# {long}\n\n| {long} |\n|---|\n\n```\n{long}\n```\n\n    {long}\n\n<!-- {long} -->\n"
    assert wrap.wrapped(kept) == kept
    assert wrap.wrapped(f"- {long}\n- b\n").splitlines()[1:] == [f"  {('word ' * 19).strip()}", "- b"]


def test_no_line_begins_with_what_would_be_a_mark(wrap: ModuleType) -> None:
    words = ["word"] * 60
    for at in range(1, 60):
        text = " ".join([*words[:at], "1.", *words[at:]]) + "\n"
        assert rendered(wrap.wrapped(text)) == rendered(text)
