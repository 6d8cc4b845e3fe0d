"""No two test files share a name. pytest imports test files by name and could not collect both."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

from source_tree import sources


def test_names_of_test_files_are_unique() -> None:
    names = Counter(PurePath(source.name).name for source in sources("tests"))
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []
