"""Files stay under 500 lines and functions under 60, so that each has one purpose. Triton kernels are exempt."""

from __future__ import annotations

import ast

import pytest
from source_tree import CODE_FOLDERS, Source, sources

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
EXEMPT_FOLDER = "engine/kernels/"

every_file = pytest.mark.parametrize("source", sources(*CODE_FOLDERS), ids=lambda source: source.name)


@every_file
def test_file_is_short(source: Source) -> None:
    lines = source.text.count("\n")
    assert lines < MAX_FILE_LINES, f"{source.name} has {lines} lines"


@pytest.mark.parametrize(
    "source",
    [source for source in sources(*CODE_FOLDERS) if not source.name.startswith(EXEMPT_FOLDER)],
    ids=lambda source: source.name,
)
def test_functions_are_short(source: Source) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{source.name}:{node.lineno}: {node.name} has {lines} lines"
