"""Command-line agents from npm, at the versions that `npm/package-lock.json` pins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LOCKED = Path(__file__).with_name("npm")
INSTALL_TIMEOUT_S = 240.0
NO_NPM = "no npm"
NO_REGISTRY = "npm's registry cannot be reached"
_CANNOT_BE_REACHED = ("ENOTFOUND", "ECONNREFUSED", "ECONNRESET", "EAI_AGAIN", "ETIMEDOUT")


def installed(name: str, directory: Path) -> Path:
    """The program of that name. Installs it into `directory` if it is not there. Skips the test without npm or its
    registry."""
    program = directory / "node_modules" / ".bin" / name
    lock = (LOCKED / "package-lock.json").read_bytes()
    mark = directory / "installed-lock.json"
    if program.exists() and mark.exists() and mark.read_bytes() == lock:
        return program
    if (npm := shutil.which("npm")) is None:
        pytest.skip(NO_NPM)
    directory.mkdir(parents=True, exist_ok=True)
    for file in LOCKED.iterdir():
        shutil.copy(file, directory / file.name)
    command = [npm, "ci", "--no-audit", "--no-fund", "--prefix", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode and any(code in done.stderr for code in _CANNOT_BE_REACHED):
        pytest.skip(NO_REGISTRY)
    assert done.returncode == 0, done.stderr
    mark.write_bytes(lock)
    return program
