"""Writes docs/parameters.md: the fields of every request body, from the schemas that check them.

python docs/parameters.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wrap import wrapped

from serving.front.http import create_http_app

PAGE = Path(__file__).resolve().parent / "parameters.md"
HEAD = """# Parameters

This page lists the fields of every request body, as the server checks them. `python docs/parameters.py` writes it.
[The API](api.md) and the protocols' own documentation describe what the fields do.

A field marked "required" must be sent. Any other field may be left out. It may also be null, unless the table shows a
default for it. (`max_new_tokens` has a default and may be null.)

The fields after "Refused" are known, but not supported. The server accepts them only if they ask for nothing: null,
false, 0 or empty. The server refuses unknown fields, unless [`api.unknown_fields`](settings.md#apiunknown_fields) lets
them pass. `/openapi.json` has the same information for programs.
"""
SHARED = "## Objects\n\nThe tables above refer to these objects.\n"
Schema = Mapping[str, Any]


def page() -> str:
    """The whole page, Markdown."""
    no_service: Any = None  # no request is made
    document = create_http_app(no_service).openapi()
    objects: dict[str, Schema] = document["components"]["schemas"]
    bodies = dict(_bodies(document["paths"]))
    parts = [HEAD]
    named: list[str] = []
    for path, name in bodies.items():
        parts.append(f"## {path}\n\n{_table(objects[name], named)}")
    parts.append(SHARED)
    shown: set[str] = set()
    while left := [name for name in dict.fromkeys(named) if name not in shown]:
        shown.add(left[0])
        parts.append(f"### {left[0]}\n\n{_table(objects[left[0]], named)}")
    return wrapped("\n".join(parts))


def _bodies(paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The calls that have a body, each with the name of its schema. Calls with the same schema are one entry."""
    calls: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                schema = content["application/json"]["schema"]
                calls.setdefault(_name(schema), []).append(f"{method.upper()} {path.replace(':path', '')}")
    for name, places in calls.items():
        yield ", ".join(f"`{place}`" for place in places), name


def _table(schema: Schema, named: list[str]) -> str:
    about = schema.get("description", "")
    lines = [f"{_flat(about)}\n"] if about else []
    refused = []
    if "properties" not in schema:
        return "\n".join([*lines, f"{_value(schema, named)}\n"])
    lines += ["| field | value | default | |", "|---|---|---|---|"]
    needed = schema.get("required", ())
    for field, value in sorted(schema["properties"].items(), key=lambda item: item[0] not in needed):
        kinds = _kinds(value)
        if kinds == [{"type": "null"}]:
            refused.append(f"`{field}`")
            continue
        default = "required" if field in needed else _default(value)
        lines.append(
            f"| `{field}` | {_value(value, named)} | {default} | {_flat(value.get('description', ''))} |"
        )
    if refused:
        lines.append(f"\nRefused: {', '.join(refused)}.")
    return "\n".join([*lines, ""])


def _kinds(schema: Schema) -> list[Schema]:
    """The schemas of the values that are allowed. Null is among them only if nothing else is allowed."""
    kinds: list[Schema] = [
        kind
        for each in schema.get("anyOf") or schema.get("oneOf") or [schema]
        for kind in _flattened(each, schema)
    ]
    plain = [{"type": kind["type"]} if kind.get("type") == "null" else kind for kind in kinds]
    return [kind for kind in plain if kind.get("type") != "null"] or plain[:1]


def _flattened(kind: Schema, whole: Schema) -> list[Schema]:
    return [kind] if kind is whole or not ("anyOf" in kind or "oneOf" in kind) else _kinds(kind)


def _value(schema: Schema, named: list[str]) -> str:
    return " or ".join(dict.fromkeys(_kind(kind, named) for kind in _kinds(schema)))


def _kind(kind: Schema, named: list[str]) -> str:
    if "$ref" in kind:
        named.append(_name(kind))
        return f"[{_name(kind)}](#{_name(kind).lower()})"
    values = kind.get("enum", [kind["const"]] if "const" in kind else [])
    if values:
        return ", ".join(f"`{value}`" for value in values if value is not None).replace("`True`", "`true`")
    match kind.get("type"):
        case "integer" | "number":
            return kind["type"] + _range(kind)
        case "string":
            return f"string (at most {kind['maxLength']:,} characters)" if "maxLength" in kind else "string"
        case "array":
            most = f" (at most {kind['maxItems']:,})" if "maxItems" in kind else ""
            return f"list{most} of {_value(kind.get('items', {}), named)}"
        case "object":
            return "object"
        case "boolean":
            return "boolean"
    return "any value"


def _range(kind: Schema) -> str:
    low, high = (
        kind.get("minimum", kind.get("exclusiveMinimum")),
        kind.get("maximum", kind.get("exclusiveMaximum")),
    )
    if low is None and high is None:
        return ""
    if low == high:
        return f", {_number(low)} only"
    if "exclusiveMinimum" in kind:
        return f", above {_number(low)}, at most {_number(high)}"
    return f", {_number(low)} to {_number(high)}"


def _number(value: float | None) -> str:
    if value is None:
        return "any"
    for power in (31, 63):
        for exact, shown in (
            (2**power - 1, f"2^{power} − 1"),
            (2**power, f"2^{power}"),
            (-(2**power), f"−2^{power}"),
        ):
            if value == exact:
                return shown
    return f"{value:g}"


def _default(value: Schema) -> str:
    default = value.get("default")
    return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _name(reference: Schema) -> str:
    return str(reference["$ref"].rpartition("/")[2])


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
