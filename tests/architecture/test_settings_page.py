"""docs/settings.md agrees with the models and the table of docs/operations.md, and lists every variable that is
read."""

from __future__ import annotations

import importlib.util
import re

from source_tree import PACKAGES, ROOT, sources


def test_the_page_is_that_of_the_models() -> None:
    spec = importlib.util.spec_from_file_location("settings", ROOT / "docs" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    assert settings.PAGE.read_text() == settings.page(), "python docs/settings.py writes it anew"


def test_every_variable_of_the_environment_is_listed() -> None:
    listed = set(re.findall(r"^\| `(KEDGE_\w+)`", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE))
    read = {name for source in sources(*PACKAGES) for name in re.findall(r'"(KEDGE_[A-Z_]+)"', source.text)}
    assert listed == read
