"""`kedge serve` in a process of its own, with a script in place of Ray Serve's `serve run`, and without Ray's
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KEDGE = """
import os, signal, sys
from types import ModuleType

import ray

sys.executable, code = sys.argv.pop(1), sys.argv.pop(1)
scripts = ModuleType("ray.serve.scripts") if code else None
if code:
    exec(code, vars(scripts))
sys.modules["ray.serve.scripts"] = scripts

def init(**options):
    scripts.connected = options
    signal.signal(signal.SIGTERM, lambda *_: os.abort())  # as Ray's own handler does

ray.init = init
from serving.cli.main import main

main()
"""
COMMAND = """
class cli:
    main = staticmethod(main)
"""


def start_kedge(
    directory: Path, serve_run: str | None, arguments: list[str], **variables: str
) -> subprocess.Popen[str]:
    """Starts `kedge serve` as if it was installed in `directory`/bin and Ray had never run. `serve_run` is the code of
    a function main(arguments, prog_name), which finds in `connected` what `ray.init` was given; None: Ray Serve is not
    installed."""
    python = directory / "bin" / "python"
    if not python.exists():
        python.parent.mkdir()
        python.symlink_to(sys.executable)
    code = "" if serve_run is None else serve_run + COMMAND
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", KEDGE, str(python), code, "serve", *arguments],
        env=inherited | {"RAY_TMPDIR": str(directory / "tmp")} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
