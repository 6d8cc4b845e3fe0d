"""Each command of docs/runbooks.md does what the page says: docs/runbooks.py runs them, as a reader would."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from served_cluster import ROOT

WITHIN_S = 280.0


@pytest.mark.timeout(360)
def test_every_command_of_the_runbooks_works() -> None:
    command = [sys.executable, "docs/runbooks.py"]
    walk = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told, _ = walk.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        walk.send_signal(signal.SIGINT)  # ends its cluster, too
        told, _ = walk.communicate(timeout=60.0)
    assert walk.returncode == 0, told[-6000:]
    if "Redis is not installed" in told:
        pytest.skip("all but those of redis-cli work; Redis is not installed")
