"""pyproject.toml, the checks and docs/platforms.md agree on the supported Pythons and systems."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = re.compile(r"\b3\.\d+\b")
ON_WINDOWS = (
    "import runpy, setuptools.command.build_ext, sys; sys.platform = 'win32'; runpy.run_path('setup.py')"
)


def supported() -> list[str]:
    """The Python versions in the classifiers of pyproject.toml."""
    return [version for text in PROJECT["classifiers"] for version in VERSION.findall(text)]


def test_what_is_supported_is_checked() -> None:
    checked = re.search(r"^SUPPORTED=\(([\d. ]+)\)", (ROOT / ".ci" / "pythons").read_text(), re.MULTILINE)
    assert checked is not None
    assert checked[1].split() == supported()


def test_the_oldest_is_the_one_that_is_asked_for() -> None:
    oldest = supported()[0]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert tools["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert tools["mypy"]["python_version"] == oldest


def test_the_page_lists_them() -> None:
    rows = re.findall(r"^\| (3\.\d+) \|", (ROOT / "docs" / "platforms.md").read_text(), re.MULTILINE)
    assert rows == supported()


def test_windows_is_refused_at_installation() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Kedge cannot be installed on Windows")
