"""Writes docs/settings.md: every setting, with the values that are taken, from the models that check them, and with
what it does, from the table in docs/operations.md.

python docs/settings.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serving.settings.config import AppArgs

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "settings.md"
WIDTH = 110
HEAD = """# Settings

`python docs/settings.py` writes this page. What a setting may be comes from the code that checks it. What it
does comes from the table in [operations](operations.md#settings).

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

Only `model.path` must be there. Times are in seconds. A key that does not exist is refused by its name before
anything starts, and so is a value of another type. `python -m serving.settings.config my.yaml` checks a file
and starts nothing.
"""
ENVIRONMENT = """## The environment

Secrets are no settings, because Ray logs those. They are variables of the environment that Ray's processes
are started with: that of `kedge serve` if it starts Ray, or that of `ray start` on each node.

| variable | read by | meaning |
|---|---|---|
| `KEDGE_API_KEYS` | front ends | [keys](operations.md#keys) of tenants, and of none |
| `KEDGE_OPERATOR_KEYS` | front ends | [keys](operations.md#keys) of operators |
| `KEDGE_LOG_KEYS` | the controller | keys that the [session log](operations.md#encryption) is encrypted with |
| `KEDGE_REDIS_PASSWORD` | the controller | the password of the [log's Redis](operations.md#the-log-in-redis) |
| `KEDGE_REDIS_SENTINEL_PASSWORD` | the controller | the password of its Sentinels |
| `KEDGE_HOME` | all | the folder that a relative `controller.state_dir` or `cache.disk_path` starts at |
| `KEDGE_HAPROXY_CLIENT_CONNECTIONS` | HAProxy | [connections](operations.md#behind-haproxy) that an address may have |
| `KEDGE_URL` | `kedge chat`, `sessions`, … | the address of the server, without `/v1` |
| `KEDGE_API_KEY` | `kedge chat`, `sessions`, … | the key that is sent with every call |
| `KEDGE_TENANT` | `kedge sessions` and its subcommands | the tenant that a call is for, where the key is of no tenant |
"""
Schema = Mapping[str, Any]


def page() -> str:
    """The whole page, Markdown."""
    rows = _rows((DOCS / "operations.md").read_text())
    schema = AppArgs.model_json_schema()
    parts = [HEAD]
    for section, reference in schema["properties"].items():
        parts.append(f"## {section}\n")
        parts += [
            _entry(key, _values(value), default, rows[key])
            for key, value, default in _settings(section, _resolved(reference, schema), schema)
            if key in rows or "properties" not in value
        ]
    return "\n".join([*parts, ENVIRONMENT])


class Row(NamedTuple):
    """Of the table in docs/operations.md. Its default counts where the code has none."""

    default: str
    meaning: str


def _entry(key: str, values: str, default: str, row: Row) -> str:
    taken = _filled(f"Takes {values}. Default: {default or row.default}.")
    return f"### `{key}`\n\n{taken}\n\n{_filled(row.meaning)}\n"


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _rows(operations: str) -> dict[str, Row]:
    """By key."""
    found = re.findall(r"^\| `([a-z_]+\.[a-z0-9_.]+)` \| (.*?) \| (.*) \|$", operations, re.MULTILINE)
    return {
        key: Row("none" if default == "–" else default, _elsewhere(meaning))
        for key, default, meaning in found
    }


def _elsewhere(meaning: str) -> str:
    """Sentences for another page: links to headings beside the table lead to its page, and so does "below"."""
    there = meaning.replace("](#", "](operations.md#").replace("\\|", "|")
    there = re.sub(r'\bsee (below|"[^"]+")', "see [operations](operations.md#settings)", there)
    return there[0].upper() + there[1:] + ("" if there.endswith(".") else ".")


def _settings(prefix: str, section: Schema, whole: Schema) -> Iterator[tuple[str, Schema, str]]:
    """What is below a section, sections first: key, schema, and what it is if left out, if the code says so."""
    for name, value in section["properties"].items():
        key, nested = f"{prefix}.{name}", _resolved(value, whole)
        default = "none, it must be there" if name in section.get("required", ()) else _default(value)
        yield key, nested, default
        if "properties" in nested and key != "speculation.draft_model":  # which has the keys of `model`
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
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {kind[bound]:g}" for bound, word in bounds.items() if bound in kind)


def _default(value: Schema) -> str:
    match value.get("default"):
        case None | []:
            return ""
        case bool(default):
            return str(default).lower()
        case float(default):
            return f"{default:g}"
        case default:
            return f"`{default}`" if isinstance(default, str) else str(default)


if __name__ == "__main__":
    PAGE.write_text(page())
