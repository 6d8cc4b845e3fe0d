"""Refuses operating systems on which Kedge does not run: docs/platforms.md."""

from __future__ import annotations

from serving.cli.start.errors import StartError


def check_system(platform: str) -> None:
    """`platform` as in `sys.platform`. Raises StartError for Windows."""
    if platform == "win32":
        raise StartError(
            "Kedge does not run on Windows: its processes lock files, keep them from other users by their modes and"
            " speak over Unix sockets. Start it on Linux; on this machine that may be WSL 2."
        )
