"""Writes docs/settings.md: every setting, with the values that are taken and what it does, from the models that check
them (serving/settings).

python docs/settings.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serving.settings.config import AppArgs

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "settings.md"
WIDTH = 110
HEAD = """# Settings

Everything that can be set, for those who write a config file. `python docs/settings.py` writes this page from
the code that checks the settings (`serving/settings`).

Settings are the `args` of an application in a config file such as
[`configs/cluster.yaml`](../configs/cluster.yaml):

```yaml
applications:
  - name: kedge
    import_path: serving.app:build
    args:
      model:
        path: /models/my-model
      cache:
        size_mib: 4096
```

Only `model.path` must be there. Times are in seconds. `python -m serving.settings.config my.yaml` checks a
file and starts nothing. These are refused before anything starts, and named:

- a key that does not exist, and a value of another type;
- settings that contradict each other, such as `scheduler.chunk_size` above `scheduler.max_batch_tokens`;
- a setting that would do nothing beside the others, such as `cache.disk_path` without `cache.disk_mib`.
"""
ENVIRONMENT = """## The environment

Secrets are no settings, because Ray logs those. They are variables of the environment that Ray's processes
are started with: that of `kedge serve` if it starts Ray, or that of `ray start` on each node.

| variable | read by | meaning |
|---|---|---|
| `KEDGE_API_KEYS` | front ends | [keys](operations/keys.md) of tenants, and of none |
| `KEDGE_OPERATOR_KEYS` | front ends | [keys](operations/keys.md) of operators |
| `KEDGE_LOG_KEYS` | the controller | keys that [encrypt the session log](operations/session-log.md#encryption) |
| `KEDGE_REDIS_PASSWORD` | the controller | the password of the [log's Redis](operations/redis.md) |
| `KEDGE_REDIS_SENTINEL_PASSWORD` | the controller | the password of its Sentinels |
| `KEDGE_HOME` | all | the folder that a relative `controller.state_dir` or `cache.disk_path` starts at |
| `KEDGE_HAPROXY_CLIENT_CONNECTIONS` | HAProxy | [connections](operations/haproxy.md) that an address may have |
| `KEDGE_URL` | `kedge chat`, `sessions`, … | the address of the server, without `/v1` |
| `KEDGE_API_KEY` | `kedge chat`, `sessions`, … | the key that is sent with every call |
| `KEDGE_TENANT` | `kedge sessions` and its subcommands | the tenant that a call is for, where the key is of no tenant |
"""
Schema = Mapping[str, Any]


def page() -> str:
    """The whole page, Markdown."""
    schema = AppArgs.model_json_schema()
    parts = [HEAD]
    for section, reference in schema["properties"].items():
        nested = _resolved(reference, schema)
        parts.append(f"## {section}\n\n{_filled(nested['description'])}\n")
        parts += [_entry(setting) for setting in _settings(section, nested, schema)]
    return "\n".join([*parts, ENVIRONMENT])


class Setting(NamedTuple):
    """A key, with what it may be and what it is if left out in words, and what it does."""

    key: str
    values: str
    default: str
    meaning: str


def _entry(setting: Setting) -> str:
    taken = _filled(f"Takes {setting.values}. {setting.default}.")
    return f"### `{setting.key}`\n\n{taken}\n\n{_filled(setting.meaning)}\n"


def _filled(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _settings(prefix: str, section: Schema, whole: Schema) -> Iterator[Setting]:
    """All below a section. One that holds others and may be left out is a setting itself."""
    for name, value in section["properties"].items():
        key, nested = f"{prefix}.{name}", _resolved(value, whole)
        if nested is value or "anyOf" in value:
            default = "It must be there" if name in section.get("required", ()) else _default(value)
            yield Setting(key, _values(nested), default, value["description"])
        if nested is not value and key != "speculation.draft_model":  # which has the keys of `model`
            yield from _settings(key, nested, whole)


def _resolved(value: Schema, whole: Schema) -> Schema:
    """The section that a reference names, also one that may be left out; anything else as it is."""
    for option in (value, *value.get("anyOf", ())):
        if "$ref" in option:
            found: Schema = whole["$defs"][option["$ref"].rpartition("/")[2]]
            return found
    return value


def _values(value: Schema) -> str:
    """What it may be, null aside: that is to leave it out."""
    kinds = [kind for kind in value.get("anyOf", [value]) if kind.get("type") != "null"]
    return " or ".join(_kind(kind) for kind in kinds)


def _kind(kind: Schema) -> str:
    if "enum" in kind:
        *others, last = (f"`{value}`" for value in kind["enum"])
        return " or ".join([", ".join(others), last])
    match kind.get("type"):
        case "integer":
            return f"a whole number{_range(kind)}"
        case "number":
            return f"a number{_range(kind)}"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case "array":
            return "a list"
        case "object":
            return "a section" if "properties" in kind else "a map of names"
    raise ValueError(f"no words for {kind}")


def _range(kind: Schema) -> str:
    bounds = {
        "minimum": " from {:g}",
        "exclusiveMinimum": " above {:g}",
        "maximum": " to {:g}" if "minimum" in kind else ", up to {:g}",
        "exclusiveMaximum": " and below {:g}",
    }
    return "".join(words.format(kind[bound]) for bound, words in bounds.items() if bound in kind)


def _default(value: Schema) -> str:
    match value.get("default", []):
        case None:
            return "Unset by default"
        case []:
            return "Empty by default"
        case bool(default):
            return f"Default: {str(default).lower()}"
        case float(default):
            return f"Default: {default:g}"
        case default:
            return f"Default: `{default}`" if isinstance(default, str) else f"Default: {default}"


if __name__ == "__main__":
    PAGE.write_text(page())
