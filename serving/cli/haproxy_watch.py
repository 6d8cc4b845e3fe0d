"""Ends HAProxy once the process that started it has ended for any reason: `haproxy_watch.py PARENT_FD HAPROXY_FD`.

Both arguments are pidfds, so a reused process id cannot be mistaken for one of them. The watch runs beside HAProxy,
which `kedge-haproxy` becomes: Ray Serve knows HAProxy by the id of the process that it started, so no process may be
between them. (Linux can send a signal when a parent dies, but it sends it when the thread that forked dies.) It uses
the standard library only, since it starts with `python -I -S`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

PATIENCE_S = 2.0
"""How long HAProxy has to end by itself after each signal."""


def start() -> None:
    """Starts the watch over this process, which becomes HAProxy later. Ends this process if its parent has ended."""
    parent = os.getppid()
    parent_fd, own_fd = os.pidfd_open(parent), os.pidfd_open(os.getpid())
    if os.getppid() != parent:
        sys.exit("kedge-haproxy: who started it has ended")
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(parent_fd), str(own_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(parent_fd, own_fd),
        start_new_session=True,
    )
    os.close(parent_fd)
    os.close(own_fd)


def watch(parent_fd: int, haproxy_fd: int) -> None:
    """Ends HAProxy once the parent has ended. Returns when HAProxy has ended."""
    if _ended([parent_fd, haproxy_fd], None) == haproxy_fd:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            signal.pidfd_send_signal(haproxy_fd, number)
        except ProcessLookupError:
            return
        if _ended([haproxy_fd], PATIENCE_S) is not None:
            return


def _ended(pidfds: list[int], timeout_s: float | None) -> int | None:
    """A process that has ended, HAProxy first; None if none ends within `timeout_s`."""
    ended, _, _ = select.select(pidfds, [], [], timeout_s)
    return ended[-1] if ended else None


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
