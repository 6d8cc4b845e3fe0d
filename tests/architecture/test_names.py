"""No two test files share a name, since pytest imports test files by name and could not collect both. No two classes of
the product do, either: one name is for one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import PurePath

from source_tree import PACKAGES, sources


def test_names_of_test_files_are_unique() -> None:
    names = Counter(PurePath(source.name).name for source in sources("tests"))
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []


def test_names_of_classes_are_unique() -> None:
    """A Protocol may be called as what it stands for in another package. A private name is its module's own."""
    classes = (each for source in sources(*PACKAGES) for each in ast.walk(source.tree))
    names = Counter(
        each.name for each in classes if isinstance(each, ast.ClassDef) and not _is_protocol(each)
    )
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def _is_protocol(defined: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in defined.bases)
