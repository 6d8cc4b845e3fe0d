"""Windows is refused by name, before anything else is checked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serving.cli.start.errors import StartError
from serving.cli.start.operating_system import check_system

ON_WINDOWS = """
import sys
from types import SimpleNamespace

from serving.cli.main import main

sys.modules["serving.cli.commands.serve"].sys = SimpleNamespace(platform="win32", executable=sys.executable)
main()
"""


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_it_starts_on_unix(platform: str) -> None:
    check_system(platform)


def test_windows_is_refused() -> None:
    with pytest.raises(StartError, match=r"does not run on Windows.*WSL 2"):
        check_system("win32")


def test_kedge_serve_says_so_and_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS, "serve", "no-such-file.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kedge serve: Kedge does not run on Windows: ")
    assert done.stderr.count("\n") == 1
