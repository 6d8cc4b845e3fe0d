"""The installed command is interrupted before it has begun."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[4] / "pyproject.toml"
CTRL_C_WHILE_IT_IMPORTS = """
import importlib, sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "serving.cli.commands.bench":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
module, _, function = sys.argv[1].partition(":")
getattr(importlib.import_module(module), function)()
"""


def test_ctrl_c_during_the_imports_ends_it_quietly() -> None:
    """It printed a traceback of whatever it was just importing."""
    entry = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["kedge"]
    command = [sys.executable, "-c", CTRL_C_WHILE_IT_IMPORTS, entry]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
