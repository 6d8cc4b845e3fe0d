"""Allows `debug.faults` only if nobody else can call."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from serving.settings.strict_settings import SettingsError


def refuse_faults_in_the_open(hosts: Mapping[str, str | None]) -> None:
    """`hosts` are the addresses that take calls, by their settings. Raises SettingsError unless all are loopback."""
    for setting, host in hosts.items():
        if host is not None and not _is_loopback(host):
            raise SettingsError(
                f"bad application settings:\n  args.debug.faults: {setting} is {host}, where others may call. Faults"
                " can be planted on loopback only, such as 127.0.0.1"
            )


def host_of_serve() -> str | None:
    """The host on which the running Ray Serve takes calls; None if none is running."""
    from ray.serve.context import _get_global_client  # there is no public function for this

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config.host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
