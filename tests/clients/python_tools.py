"""Environments with other projects' Python clients, at the versions that the locks in `python/` pin."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOCKED = Path(__file__).with_name("python")
INSTALL_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 100.0
NO_INDEX = "Python's package index cannot be reached"
_CANNOT_BE_REACHED = ("dns error", "tcp connect error", "operation timed out", "Connection refused")


def interpreter(name: str, directory: Path) -> Path:
    """The interpreter of environment `python/NAME.lock`. Installs the environment into `directory` if it is not
    there."""
    python = directory / "bin" / "python"
    lock = LOCKED / f"{name}.lock"
    mark = directory / "installed.lock"
    if python.exists() and mark.exists() and mark.read_bytes() == lock.read_bytes():
        return python
    _uv("venv", "--clear", "--python", sys.executable, str(directory))
    _uv("pip", "sync", "--require-hashes", "--python", str(python), str(lock))
    mark.write_bytes(lock.read_bytes())
    return python


async def run_program(python: Path, program: Path, *arguments: str, home: Path) -> str:
    """Runs the program and returns what it prints. The program sees none of the settings of whoever runs the tests."""
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(program),
        *arguments,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
    assert process.returncode == 0, (out.decode(), err.decode())
    return out.decode()


def _uv(*arguments: str) -> None:
    """Runs the `uv` of this environment. Skips the test if `uv` cannot reach the package index."""
    command = [str(Path(sys.executable).with_name("uv")), "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode and any(reason in done.stderr for reason in _CANNOT_BE_REACHED):
        pytest.skip(NO_INDEX)
    assert done.returncode == 0, done.stderr
