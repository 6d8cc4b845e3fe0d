"""Files stay under 500 lines and functions under 60, so that each has one purpose. Triton kernels are exempt."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_tree import CODE_FOLDERS, Source, sources

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
EXEMPT_FOLDER = "engine/kernels/"


def test_files_are_short() -> None:
    lines = {source.name: source.text.count("\n") for source in sources(*CODE_FOLDERS)}
    assert not {name: count for name, count in lines.items() if count >= MAX_FILE_LINES}


def test_functions_are_short() -> None:
    files = [source for source in sources(*CODE_FOLDERS) if not source.name.startswith(EXEMPT_FOLDER)]
    lines = {name: count for source in files for name, count in _functions(source)}
    assert not {name: count for name, count in lines.items() if count >= MAX_FUNCTION_LINES}


def _functions(source: Source) -> Iterator[tuple[str, int]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{source.name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1
