"""docs/cli.md lists the options of the commands."""

from __future__ import annotations

import importlib.util

from source_tree import ROOT


def test_the_options_are_those_of_the_commands() -> None:
    spec = importlib.util.spec_from_file_location("cli", ROOT / "docs" / "cli.py")
    assert spec is not None
    assert spec.loader is not None
    cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    text = cli.PAGE.read_text()
    assert text == cli.page(text), "python docs/cli.py writes it anew"
    assert "#### `kedge sessions move`" in text
