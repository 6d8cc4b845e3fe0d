"""The documentation builds as a site (docs/site/conf.py). Every page is in its lists, every link leads somewhere, and
the site takes nothing from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

CONFIG = ROOT / "docs" / "site"
FIRST = "docs/site/index.md"
TAKEN_FROM = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]*)\"")
ELSEWHERE = re.compile(r"^(?:\w+:)?//")


def build(sources: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site as `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", CONFIG]
    command += ["-d", site.with_name("sources"), sources, site]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_make_docs_builds_it_likewise() -> None:
    """What the other tests say of the site holds for that of `make docs`, which continuous integration does not run."""
    recipe = (ROOT / "Makefile").read_text().split("\ndocs: ")[1].split("\n\n")[0]
    assert " -q -W --keep-going -c docs/site -d build/site-sources . build/site\n" in recipe


def test_every_document_is_a_page(site: Path) -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    pages = {path.relative_to(ROOT).with_suffix(".html") for path in documents}
    assert {page for page in pages if not (site / page).exists()} == set()
    assert (site / "index.html").exists()


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """No fonts, scripts or pictures from other servers: the site works without a network and tells nobody who reads
    it."""
    found = [
        f"{page.name}: {address}"
        for page in site.rglob("*.html")
        for address in TAKEN_FROM.findall(page.read_text())
        if ELSEWHERE.match(address)
    ]
    found += [
        f"{sheet.name}: {address}"
        for sheet in site.rglob("*.css")
        for address in re.findall(r"url\([\"']?([^)\"']*)", sheet.read_text())
        if ELSEWHERE.match(address)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("page", "listed", "said"),
    [
        ("# A\n[gone](gone.md)\n", True, "'gone.md'"),
        ("# A\n[gone](#gone)\n", True, "'gone'"),
        ("# A\n", False, "isn't included in any toctree"),
        ("# A\n[here](#a)\n", True, None),
    ],
)
def test_what_leads_nowhere_fails_the_build(
    tmp_path: Path, page: str, listed: bool, said: str | None
) -> None:
    sources = tmp_path / "repository"
    (sources / "docs" / "site").mkdir(parents=True)
    (sources / FIRST).write_text("# All\n" + ("```{toctree}\n/docs/a\n```\n" if listed else ""))
    (sources / "docs" / "a.md").write_text(page)
    done = build(sources, tmp_path / "site")
    assert (done.returncode == 0) == (said is None), done.stderr
    assert (said or "") in done.stderr
