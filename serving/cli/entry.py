"""The installed command `kedge`. Ctrl-C ends it quietly also while its modules are imported, for half a second."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of commands, as of a shell's."""


def main() -> None:
    try:
        from serving.cli.main import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command()
