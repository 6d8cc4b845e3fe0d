"""What Ray Serve takes from the environment only. docs/operations.md says what each variable does ("Behind HAProxy",
"Ray notes")."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

ENABLE_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


class Proxy(StrEnum):
    """What takes HTTP calls: Ray Serve's own proxy, or HAProxy in place of it."""

    RAY = "ray"
    HAPROXY = "haproxy"


def serve_environment(environ: Mapping[str, str], executables: Path, proxy: Proxy) -> dict[str, str]:
    """The environment of `serve run`: `environ` with what Kedge needs, and with the folder `executables` first on PATH.
    A variable of Ray Serve's that is set already stays as it is."""
    paths = [str(executables), *filter(None, [environ.get("PATH")])]
    # Ray reads the header of this name before Kedge, and answers 500 where it is no UTF-8: another name than Kedge's.
    wanted = {"RAY_SERVE_SESSION_ID_HEADER_KEY": "x-ray-session-id"}
    chosen = {"PATH": os.pathsep.join(paths)}
    if proxy is Proxy.HAPROXY:
        chosen[ENABLE_HAPROXY] = "1"
        wanted |= {
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(executables / "kedge-haproxy"),
            "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        }
    return wanted | dict(environ) | chosen
