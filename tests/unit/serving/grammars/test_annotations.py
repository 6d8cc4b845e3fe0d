"""What restricts nothing in a JSON schema does not keep it from being enforced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from serving.grammars.annotations import without_annotations
from serving.text.tool_calls.formats import FormatName
from serving.wire.turns import OutputConstraint
from tests.unit.serving.grammars.test_grammars import begun, feed, refused, schema
from tests.unit.serving.grammars.test_strict_calls import compiled, tokenizer

ZOD_RECORD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "r": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        }
    },
    "required": ["r"],
    "additionalProperties": False,
}


class Made(pydantic.BaseModel):
    path: Path
    secret: pydantic.SecretStr
    raw: bytes
    encoded: pydantic.Base64Bytes
    parsed: pydantic.Json[int]
    by_path: dict[Path, int]


MADE = Made.model_json_schema()
NAMES: tuple[FormatName, ...] = get_args(FormatName)


def test_schemas_of_zod_and_pydantic_are_enforced() -> None:
    feed(begun(schema(ZOD_RECORD)), '{"r": {"a": 1}}')
    constraint = begun(schema(MADE))
    values = {"path": "/a", "secret": "b", "raw": "c", "encoded": "ZA==", "parsed": "1", "by_path": {"/a": 1}}
    feed(constraint, json.dumps(values))
    assert constraint.complete


def test_items_that_need_not_be_unique_are_enforced() -> None:
    constraint = begun(schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}))
    feed(constraint, "[1, 1]")
    assert constraint.complete


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parameters", [ZOD_RECORD, MADE], ids=["zod", "pydantic"])
def test_parameters_of_functions_are_enforced(name: FormatName, parameters: dict[str, Any]) -> None:
    functions = [{"name": "f", "parameters": parameters, "must": True}]
    wanted = {"format": name, "functions": functions, "parallel": True, "answer": parameters}
    begun(OutputConstraint("tool_calls", json.dumps(wanted)))
    compiled(tokenizer(name, special=True), json.dumps({**wanted, "reasoning": None}))


@pytest.mark.parametrize(
    "place",
    [
        lambda held: {"properties": {"a": held}},
        lambda held: {"properties": {"properties": {"items": held}}},
        lambda held: {"additionalProperties": held},
        lambda held: {"patternProperties": {"^format$": held}},
        lambda held: {"items": held},
        lambda held: {"items": [held]},
        lambda held: {"prefixItems": [held]},
        lambda held: {"anyOf": [held, True]},
        lambda held: {"allOf": [{"oneOf": [held]}]},
        lambda held: {"$ref": "#/$defs/a", "$defs": {"a": held}},
        lambda held: {"$ref": "#/definitions/format", "definitions": {"format": held}},
    ],
)
def test_they_are_dropped_wherever_a_schema_is(place: Any) -> None:
    held = {
        "type": "string",
        "format": "path",
        "propertyNames": {"type": ["string"], "title": "Name"},
        "uniqueItems": False,
    }
    assert without_annotations(place(held)) == place({"type": "string"})


@pytest.mark.parametrize(
    "kept",
    [
        *({word: {"format": "path", "propertyNames": True}} for word in ("const", "default", "x-mine")),
        {"enum": [{"format": "path"}], "examples": [{"propertyNames": {}}]},
        {"properties": {"format": {"type": "string"}, "propertyNames": {"type": "object"}}},
        {"required": ["format", "propertyNames"]},
        *({"uniqueItems": each} for each in (True, None, 0)),
        {"properties": {"const": {"const": {"format": "path"}}}},
        *(
            {"propertyNames": each}
            for each in (False, {"minLength": 2}, {"type": "number"}, {"format": "date"})
        ),
        *(
            {"format": each}
            for each in ("date", "date-time", "time", "duration", "email", "hostname", "ipv4")
        ),
        *({"format": each} for each in ("ipv6", "uuid", "uri", 5)),
    ],
)
def test_everything_else_stays(kept: dict[str, Any]) -> None:
    assert without_annotations(kept) == kept


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"propertyNames": False}, "propertyNames"),
        ({"propertyNames": {"format": "date"}}, "propertyNames"),
        ({"format": 5}, "format"),
    ],
)
def test_what_restricts_is_refused_as_before(wanted: dict[str, Any], reason: str) -> None:
    assert reason in refused(schema(wanted)).message


def test_a_known_format_is_enforced() -> None:
    constraint = begun(schema({"type": "string", "format": "date"}))
    with pytest.raises(AssertionError):
        feed(constraint, '"x')
