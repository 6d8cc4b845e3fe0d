"""Reads a `serve run` config file as far as its settings are Kedge's: the `args` of each application, and where it
listens."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from serving.settings.strict_settings import SettingsError

EVERYWHERE = "0.0.0.0"
HTTP_PORT = 8000
"""Where a file of Ray Serve has it listen that does not say so."""

_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in a mapping; YAML itself would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
                continue
            if (key.tag, key.value) in seen:
                raise SettingsError(f"line {key.start_mark.line + 1}: key {key.value!r} is there twice")
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class ServeFile:
    """The `args` of every application in a file, unchecked, the first one's `route_prefix`, and where it listens."""

    args: list[Any]
    route_prefix: str
    http_host: str
    http_port: int


def read_file(path: str) -> ServeFile:
    """Raises SettingsError for a file that is no config of Ray Serve, yaml.YAMLError and OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            document = yaml.load(file, _Loader)
        except UnicodeDecodeError as error:
            raise SettingsError(f"not a text file in UTF-8: {error.reason}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not applications:
        raise SettingsError("'applications' is missing: a list with one application at least")
    if not all(isinstance(application, dict) for application in applications):
        raise SettingsError("'applications' has an entry that is no mapping of keys to values")
    prefixes = [str(application.get("route_prefix") or "/") for application in applications]
    if wrong := [prefix for prefix in prefixes if not prefix.startswith("/")]:
        raise SettingsError(f"route_prefix: a path that begins with / was expected, not {wrong[0]!r}")
    _refuse_near(document, ["http_options"], "", cutoff=0.8)
    host, port = _listens(document.get("http_options") or {})
    return ServeFile(
        args=[application.get("args") or {} for application in applications],
        route_prefix=prefixes[0],
        http_host=host,
        http_port=port,
    )


def _listens(options: Any) -> tuple[str, int]:
    if not isinstance(options, dict):
        raise SettingsError(f"http_options: a mapping was expected, not {options!r}")
    _refuse_near(options, ["host", "port"], "http_options: ", cutoff=0.6)
    host, port = options.get("host") or EVERYWHERE, options.get("port", HTTP_PORT)
    if not isinstance(host, str):
        raise SettingsError(f"http_options.host: an address was expected, not {host!r}")
    if type(port) is not int or not 0 <= port <= 65535:
        raise SettingsError(f"http_options.port: a number from 0 to 65535 was expected, not {port!r}")
    return host, port


def _refuse_near(mapping: Mapping[Any, Any], names: Sequence[str], where: str, *, cutoff: float) -> None:
    """Ray Serve takes keys that it does not know, and without a host it listens on every interface. No other key of its
    own is as near to the `names` as `cutoff`. Raises SettingsError."""
    for key in mapping:
        near = difflib.get_close_matches(str(key), names, n=1, cutoff=cutoff)
        if near and key not in names:
            raise SettingsError(f"{where}unknown key {key!r}; did you mean {near[0]!r}?")
