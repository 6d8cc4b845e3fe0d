"""Drops from a JSON schema what restricts nothing, and what llguidance would refuse: formats that it does not know,
`propertyNames` that allow every name, and `uniqueItems: false`. Schemas made by zod and pydantic have the first two,
those of OpenAPI documents the last.

A format that is not known is an annotation, as JSON Schema has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from serving.text.tool_calls.pythonic_grammar import SAYS_NOTHING

_SCHEMAS = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "items", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "prefixItems", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Words whose value is a schema, or a list of schemas."""
_BY_NAME = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
"""Words whose value has schemas by name."""
_MAX_FORMAT_CHARS = 64


def without_annotations(schema: Any) -> Any:
    """A copy without them. Values that are no schemas stay as they are, such as those of `const` and `default`. Raises
    ValueError if the schema is too deep."""
    try:
        return _kept(schema)
    except RecursionError:
        raise ValueError("the schema's recursion is too deep") from None


def _kept(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_kept(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for word, value in schema.items():
        if word in _BY_NAME and isinstance(value, Mapping):
            value = {name: _kept(each) for name, each in value.items()}
        elif word in _SCHEMAS:
            value = _kept(value)
        if not _restricts_nothing(word, value):
            kept[word] = value
    return kept


def _restricts_nothing(word: str, value: Any) -> bool:
    if word == "propertyNames":
        return _allows_every_string(value)
    if word == "uniqueItems":
        return value is False
    return word == "format" and isinstance(value, str) and not _is_known_format(value[:_MAX_FORMAT_CHARS])


def _allows_every_string(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    allowed = schema.get("type", "string")
    return set(schema) - SAYS_NOTHING <= {"type"} and "string" in (
        allowed if isinstance(allowed, list) else [allowed]
    )


@lru_cache(maxsize=256)
def _is_known_format(name: str) -> bool:
    """llguidance has no list of the formats that it knows."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
    return not LLMatcher.validate_grammar(grammar)
