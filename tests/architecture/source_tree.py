"""The project's Python files, parsed."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cache", "controllers", "engine", "serving")
CODE_FOLDERS = (*PACKAGES, "assets", "benchmarks", "configs", "docs", "tests")


@dataclass(frozen=True)
class Source:
    """One file; `name` is its path relative to the project."""

    name: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @property
    def package(self) -> str:
        return self.name.split("/")[0]

    def imports(self) -> Iterator[str]:
        """Dotted names of everything imported, also inside functions."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""


@functools.cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below the folders. All tests share them, so that each is parsed once."""
    if len(folders) > 1:
        return tuple(source for folder in folders for source in sources(folder))
    paths = sorted((ROOT / folders[0]).rglob("*.py"))
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths)


def tracked_files() -> list[Path]:
    """Every tracked file; every file of the folder if it is not a Git repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
