"""Ends HAProxy when the process that started it has ended, however that came: `haproxy_watch.py PARENT_FD HAPROXY_FD`.

Both are pidfds, so that no other process of a reused id can be meant. The watch runs beside HAProxy, which
`kedge-haproxy` becomes: Ray Serve knows HAProxy by the id of the process that it started, so nothing can stand between
them. (Linux can send a signal at a parent's death, but that is the death of the thread which forked.) It uses the
standard library only, since it starts with `python -I -S`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

PATIENCE_S = 2.0
"""So long HAProxy has to end by itself."""


def start() -> None:
    """Starts the watch over this process, which is to become HAProxy. Ends it if its parent has ended already."""
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
    """Returns when HAProxy has ended."""
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
    """The first of the processes that has ended; None if none has in time."""
    ended, _, _ = select.select(pidfds, [], [], timeout_s)
    return ended[-1] if ended else None


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
