"""The text between tags becomes the JSON that a function's schema asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.text.tool_calls.argument_values import argument_json, argument_types

STRING, ANY = frozenset(("string",)), None
TYPES: list[tuple[object, set[str] | None]] = [
    ({"type": "string"}, {"string"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"enum": ["a", "b"]}, {"string"}),
    ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
    ({"const": True}, {"boolean"}),
    ({"$ref": "#/$defs/place~1x"}, {"object"}),
    ({"$ref": "#/$defs/circle"}, None),
    ({"$ref": "elsewhere.json#/a"}, None),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/place~1x"}]}, {"string", "object"}),
    ({"oneOf": [{"type": "string"}, {}]}, None),
    ({"description": "any"}, None),
    (True, None),
]
VALUES: list[tuple[str, frozenset[str] | None, Any]] = [
    ("5", frozenset(("integer",)), 5),
    (" 5\n", frozenset(("number",)), 5),
    ("5", STRING, "5"),
    ("5", frozenset(("string", "null")), "5"),
    ("null", frozenset(("string", "null")), None),
    ("None", frozenset(("string", "null")), None),
    ("True", frozenset(("boolean",)), True),
    ("true", ANY, True),
    ('{"a": [1, 2.5]}', frozenset(("object",)), {"a": [1, 2.5]}),
    ("{'a': (1)}", frozenset(("object",)), {"a": 1}),
    ("{1: 2}", STRING, "{1: 2}"),
    ("{'a': {1, 2}}", ANY, "{'a': {1, 2}}"),
    ('"quoted"', ANY, '"quoted"'),
    ("words, \U0001f600", frozenset(("integer",)), "words, \U0001f600"),
    ("NaN", frozenset(("number",)), "NaN"),
    ("1e999", frozenset(("number",)), "1e999"),
    ("9" * 5000, frozenset(("integer",)), "9" * 5000),
    (r"['\ud800']", ANY, r"['\ud800']"),
    (r"['\d']", ANY, [r"\d"]),
    ("", ANY, ""),
    ("[" * 100_000, ANY, "[" * 100_000),
    ("-" * 60_000 + "1", ANY, "-" * 60_000 + "1"),
]


@pytest.mark.parametrize(("held", "expected"), TYPES)
def test_the_types_of_an_argument(held: object, expected: set[str] | None) -> None:
    definitions = {"place/x": {"type": "object"}, "circle": {"$ref": "#/$defs/circle"}}
    assert argument_types({"properties": {"a": held}, "$defs": definitions}, "a") == expected


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"b": {"type": "string"}}}])
def test_of_an_unknown_argument_nothing_is_known(schema: dict[str, object]) -> None:
    assert argument_types(schema, "a") is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("text", "types", "expected"), VALUES)
def test_a_value_is_what_its_type_asks_for(text: str, types: frozenset[str] | None, expected: object) -> None:
    told = argument_json(text, types)
    told.encode()
    value = json.loads(told)
    assert (type(value), value) == (type(expected), expected)
