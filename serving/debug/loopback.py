"""Where `debug.faults` may be on: only where nobody else can call."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from serving.settings.strict_settings import SettingsError


def refuse_faults_in_the_open(hosts: Mapping[str, str | None]) -> None:
    """`hosts` are where calls are taken, by the setting that says so. Raises SettingsError unless each is loopback."""
    for setting, host in hosts.items():
        if host is not None and not _is_loopback(host):
            raise SettingsError(
                f"bad application settings:\n  args.debug.faults: {setting} is {host}, where others may call. Faults"
                " can be planted on loopback only, such as 127.0.0.1"
            )


def host_of_serve() -> str | None:
    """Where the Ray Serve that runs takes calls; None if there is none."""
    from ray.serve.context import _get_global_client  # there is no public way to ask

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config.host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
