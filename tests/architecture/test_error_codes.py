"""Every error code that a client can get is in docs/api/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serving.wire.errors import STATUS_BY_CODE

ROOT = Path(__file__).parents[2]
BEFORE = (r"ErrorInfo\(\s*\d{3},\s*", r"unavailable\([^()]*,\s*", r"\bcode=", r"^    code = ", r"^_NO_\w+ = ")
IN_CODE = re.compile(rf'(?:{"|".join(BEFORE)})"(\w+)"', re.MULTILINE)
INSIDE = {
    "engine_error": "the base of the engine's errors",
    "session_busy": "the engine's own check; clients get turn_in_flight",
    "turn_not_in_flight": "between front end and controller",
}
"""Codes that never reach a client, and why."""


def codes() -> set[str]:
    found = set(STATUS_BY_CODE)
    for package in ("serving", "controllers", "engine"):
        for path in (ROOT / package).rglob("*.py"):
            found.update(IN_CODE.findall(path.read_text()))
    return found


@pytest.mark.parametrize("code", sorted(codes()))
def test_the_page_has_the_code(code: str) -> None:
    assert code in INSIDE or f"`{code}`" in (ROOT / "docs" / "api" / "errors.md").read_text()
