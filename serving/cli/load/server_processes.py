"""Finds the processes of a Kedge server on this machine, to separate their CPU use from that of others."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from serving.cli.client.server import ServerError, request_json, server_at

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def find_server_pids(url: str, api_key: str | None = None) -> tuple[int, ...]:
    """The raylets whose workers serve `url`; empty for other servers and for servers on other machines."""
    if urlsplit(url).hostname not in _LOOPBACK:
        return ()
    try:
        with server_at(url, api_key, timeout=10.0) as client:
            info = request_json(client, "GET", "/get_server_info")
        replicas = [int(replica["pid"]) for replica in info["replicas"]]
    except (ServerError, KeyError, TypeError, ValueError):
        return ()
    raylets = {_raylet_of(pid) for pid in replicas}
    return tuple(sorted(pid for pid in raylets if pid is not None))


def _raylet_of(pid: int) -> int | None:
    """The parent of a Ray worker, if it is a raylet on this machine."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except (OSError, ValueError, IndexError):
        return None
    return parent if name == "raylet" else None
