"""docs/parameters.md agrees with the schemas."""

from __future__ import annotations

import importlib.util

from source_tree import ROOT


def test_the_page_is_that_of_the_schemas() -> None:
    spec = importlib.util.spec_from_file_location("parameters", ROOT / "docs" / "parameters.py")
    assert spec is not None
    assert spec.loader is not None
    parameters = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parameters)
    assert parameters.PAGE.read_text() == parameters.page(), "python docs/parameters.py writes it anew"


def test_no_two_schemas_share_a_name() -> None:
    """pydantic tells them apart by the modules they are in, and the headings were those paths."""
    assert "serving__" not in (ROOT / "docs" / "parameters.md").read_text()
