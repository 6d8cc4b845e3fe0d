"""Arguments of calls that are written as text between tags: which are strings, and what the others are as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from serving.text.tool_calls.python_literals import python_value

_MAX_DEPTH = 8
"""Depth of schemas within schemas; below that, any value is accepted."""
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """JSON Schema's names of the types that the schema of a function's parameters allows for that argument. None if it
    does not say."""
    properties = schema.get("properties")
    held = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(held, schema, 0)


def argument_json(text: str, types: frozenset[str] | None, *, is_json: bool = False) -> str:
    """A whole value as JSON. It is a string, unless it reads as a value of one of the types, or the model has marked it
    (`is_json`) and it reads as any value. Python's spelling of a value, which some models write, is also read."""
    for read in (from_json, python_value):
        try:
            value = read(text.strip())
            shown = json.dumps(value, ensure_ascii=False, allow_nan=False)
            shown.encode()  # half a character, which Python's spelling allows, cannot be sent
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if is_json or _is_one_of(value, types):
            return shown
    return json.dumps(text, ensure_ascii=False)


def _is_one_of(value: Any, types: frozenset[str] | None) -> bool:
    """Strings are written without quotes here, so what reads as a quoted string is text that contains the quotes."""
    name = _TYPES.get(type(value))
    if name is None or name == "string":
        return False
    return types is None or name in types or (name == "integer" and "number" in types)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _types(referred(root, reference), root, depth + 1)
    if "const" in schema:
        return _named([schema["const"]])
    if isinstance(values := schema.get("enum"), list):
        return _named(values)
    if isinstance(name := schema.get("type"), str):
        return frozenset((name,))
    if isinstance(name, list):
        return frozenset(each for each in name if isinstance(each, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(word), list):
            found = [_types(choice, root, depth + 1) for choice in choices]
            known = [types for types in found if types is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    return None


def _named(values: list[Any]) -> frozenset[str] | None:
    return frozenset(_TYPES[type(value)] for value in values if type(value) in _TYPES)


def referred(root: Mapping[str, Any], reference: str) -> Any:
    """The target of a reference within the schema; None for any other reference."""
    found: Any = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
