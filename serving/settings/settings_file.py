"""Reads a `serve run` config file as far as its settings are Kedge's: the `args` of each application."""

from __future__ import annotations

from typing import Any

import yaml

from serving.settings.strict_settings import SettingsError

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


def read_args(path: str) -> list[Any]:
    """The `args` of every application in the file, unchecked.

    Raises SettingsError for a file that is no config of Ray Serve, yaml.YAMLError and OSError.
    """
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
    return [application.get("args") or {} for application in applications]
