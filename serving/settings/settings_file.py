"""Reads a `serve run` config file as far as its settings are Kedge's: the `args` of each application, and where it
listens."""

from __future__ import annotations

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
    """The `args` of every application in a file, the first one's `route_prefix`, and `http_options`, all unchecked."""

    args: list[Any]
    route_prefix: Any
    http_options: Any

    @property
    def http_host(self) -> str:
        return str(self._options.get("host") or EVERYWHERE)

    @property
    def http_port(self) -> int | None:
        """None if it is no number."""
        port = str(self._options.get("port", HTTP_PORT))
        return int(port) if port.isdecimal() else None

    @property
    def _options(self) -> dict[str, Any]:
        return self.http_options if isinstance(self.http_options, dict) else {}


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
    return ServeFile(
        args=[application.get("args") or {} for application in applications],
        route_prefix=applications[0].get("route_prefix") or "/",
        http_options=document.get("http_options") or {},
    )
