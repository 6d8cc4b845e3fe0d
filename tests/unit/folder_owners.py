"""Other processes that have a folder of their own inside a shared one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def another_process(program: str, root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Starts a Python program with `root` as its argument, and kills it at the end. Yields the process and the path
    that it prints first."""
    command = [sys.executable, "-c", program, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def folders(root: Path) -> set[Path]:
    return {path for path in root.iterdir() if path.is_dir()}
