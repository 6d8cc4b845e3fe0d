"""The grammar of one Python call: keyword arguments in the order of their schema's properties.

A value that is written the same in Python and JSON is held to its schema as JSON. Any other value, which may contain
True, False or None, gets a grammar made here from the schema's types, values, items and properties. Any other word of
such a schema is refused by its name. Objects of such schemas have no keys but their properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving.text.tool_calls.argument_values import argument_types, referred
from serving.text.tool_calls.grammar_terms import DEFINITIONS, GrammarTerms

_SCALARS = ("string", "integer", "number")
_TYPES = ("null", "boolean", "string", "number", "array", "object")
SAYS_NOTHING = frozenset(
    (
        *DEFINITIONS,
        *("$schema", "$id", "$comment", "$anchor", "title", "description", "default", "examples", "example"),
        *("deprecated", "readOnly", "writeOnly"),
    )
)
_ARRAY_WORDS = frozenset(("items", "minItems", "maxItems"))
_OBJECT_WORDS = frozenset(("properties", "required", "additionalProperties"))
_SCALAR_WORDS = frozenset(
    (
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_KEY = re.compile(r"[\w.\-]+")
_ANY_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_MAX_DEPTH = 64


def pythonic_call(terms: GrammarTerms, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """The text of a call between its brackets, and the rules that it needs. The rules' names begin with `name`. Raises
    ValueError that says what cannot be written in this way."""
    try:
        return _CallWriter(terms, name, parameters).call()
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("the parameters are no JSON schema") from error


class _CallWriter:
    def __init__(self, terms: GrammarTerms, name: str, parameters: Mapping[str, Any]) -> None:
        self._terms = terms
        self._name = name
        self._parameters = parameters
        self._shared = {word: parameters[word] for word in DEFINITIONS if word in parameters}
        self._references: dict[str, str] = {}
        self._any = f"{name}_any"
        self._blank = f"{name.upper()}_WS"
        self._comma = f'"," {self._blank}?'
        self._num_rules = 0
        self._rules = [rf"{self._blank}: / |\n {{0,32}}/", *self._rules_of_any()]

    def call(self) -> list[str]:
        parameters = self._parameters
        _refuse_beside(parameters, {"type"} | _OBJECT_WORDS)
        properties = _properties(parameters)
        for key in properties:
            if not _KEY.fullmatch(key):
                raise ValueError(f"{json.dumps(key)} cannot be the name of an argument")
        if not properties and (free := parameters.get("additionalProperties", True)) is not False:
            self._rules.append(f"{self._name.upper()}_KEY: {_ANY_KEY}")
            argument = self._rule(f'{self._name.upper()}_KEY "=" {self._value(free, 0)}')
            return [f"({argument} ({self._comma} {argument})*)?", *self._rules]
        arguments = [
            (self._rule(f"{self._terms.literal(f'{key}=')} {self._value(held, 0)}"), is_required)
            for key, (held, is_required) in properties.items()
        ]
        return [self._in_order(arguments), *self._rules]

    def _rules_of_any(self) -> list[str]:
        """Rules for any value, including strings in Python's single quotes."""
        text, plain = f"{self._name}_text", f"{self._name.upper()}_QUOTED"
        items = f"{self._any} ({self._comma} {self._any})*"
        entry = f'{text} ":" {self._blank}? {self._any}'
        number = self._terms.schema({"type": "number"})
        return [
            rf"{plain}: /'([^'\\\x00-\x1f\x7f]|\\['\\nrt])*'/",
            f"{text}: {self._terms.schema({'type': 'string'})} | {plain}",
            f'{self._any}: "None" | "True" | "False" | {number} | {text} | "[" ({items})? "]"'
            f' | "{{" ({entry} ({self._comma} {entry})*)? "}}"',
        ]

    def _rule(self, body: str) -> str:
        self._num_rules += 1
        name = f"{self._name}_v{self._num_rules}"
        self._rules.append(f"{name}: {body}")
        return name

    def _in_order(self, parts: Sequence[tuple[str, bool]]) -> str:
        """The parts in order, each required or not, with commas between those that are present."""
        first, later = '""', '""'
        for part, is_required in reversed(parts):
            others = (first, later)
            first = self._rule(f"{part} {others[1]}" + ("" if is_required else f" | {others[0]}"))
            later = self._rule(
                f"{self._comma} {part} {others[1]}" + ("" if is_required else f" | {others[1]}")
            )
        return first

    def _value(self, schema: Any, depth: int) -> str:
        """The term of a rule for values of the schema."""
        if schema is True or (isinstance(schema, Mapping) and not set(schema) - SAYS_NOTHING):
            return self._any
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            raise ValueError("a schema allows nothing" if schema is False else "a schema is too deep")
        if self._is_as_in_json(schema, frozenset()):
            return self._rule(self._terms.schema({**self._shared, **schema}))
        if "$ref" in schema:
            _refuse_beside(schema, {"$ref"})
            return self._referred(schema["$ref"], depth)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                _refuse_beside(schema, {word})
                return self._choice(word, schema[word], depth)
        if "const" in schema or "enum" in schema:
            _refuse_beside(schema, {"const", "enum", "type"})
            types = argument_types({"properties": {"a": {"type": schema.get("type")}}}, "a")
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = [self._terms.literal(_python(each)) for each in values if _is_of(each, types)]
            if not texts:
                raise ValueError("a schema allows nothing")
            return self._rule(" | ".join(texts))
        return self._of_types(schema, depth)

    def _referred(self, reference: str, depth: int) -> str:
        if reference not in self._references:
            self._num_rules += 1
            name = self._references[reference] = f"{self._name}_r{self._num_rules}"
            schema = referred(self._parameters, reference)
            if schema is None:
                raise ValueError(f"{json.dumps(reference)} refers to nothing in the schema")
            self._rules.append(f"{name}: {self._value(schema, depth + 1)}")
        return self._references[reference]

    def _choice(self, word: str, choices: Sequence[Any], depth: int) -> str:
        if word == "allOf" and len(choices) > 1:
            raise ValueError(f"Unimplemented keys: {json.dumps([word])}")
        if word == "oneOf" and not self._are_apart(choices):
            raise ValueError("oneOf: its schemas may have values in common")
        return self._rule(" | ".join(self._value(choice, depth + 1) for choice in choices))

    def _are_apart(self, choices: Sequence[Any]) -> bool:
        seen: set[str] = set()
        for choice in choices:
            types = argument_types({**self._shared, "properties": {"a": choice}}, "a")
            types = types and frozenset("number" if each == "integer" else each for each in types)
            if not types or types & seen:
                return False
            seen |= types
        return True

    def _of_types(self, schema: Mapping[str, Any], depth: int) -> str:
        _refuse_beside(schema, {"type"} | _ARRAY_WORDS | _OBJECT_WORDS | _SCALAR_WORDS)
        named = schema.get("type", _TYPES)
        types = [named] if isinstance(named, str) else list(named)
        texts = []
        if scalars := [each for each in types if each in _SCALARS]:
            held = {word: schema[word] for word in _SCALAR_WORDS if word in schema}
            texts.append(self._terms.schema({**held, "type": scalars}))
        for each in types:
            match each:
                case "null":
                    texts.append('"None"')
                case "boolean":
                    texts.append('"True" | "False"')
                case "array":
                    texts.append(f'"[" {self._items(schema, depth)} "]"')
                case "object":
                    texts.append(f'"{{" {self._entries(schema, depth)} "}}"')
                case str() if each not in _SCALARS:
                    raise ValueError(f"{json.dumps(each)} is no type")
        return self._rule(" | ".join(texts))

    def _items(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most < least:
            raise ValueError("a schema allows nothing")
        if most == 0:
            return '""'
        item = self._value(schema.get("items", True), depth + 1)
        more = f"({self._comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f"{item} {more}" if least else f"({item} {more})?"

    def _entries(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = _properties(schema)
        if not properties:
            free = schema.get("additionalProperties", True)
            if free is False:
                return '""'
            key = self._terms.schema({"type": "string"})
            entry = self._rule(f'{key} ":" {self._blank}? {self._value(free, depth + 1)}')
            return f"({entry} ({self._comma} {entry})*)?"
        entries = [
            (
                self._rule(
                    f"{self._terms.literal(_python(key) + ':')} {self._blank}? {self._value(held, depth + 1)}"
                ),
                is_required,
            )
            for key, (held, is_required) in properties.items()
        ]
        return self._in_order(entries)

    def _is_as_in_json(self, schema: Any, seen: frozenset[str]) -> bool:
        """Whether no value that the schema allows contains a boolean or null."""
        if not isinstance(schema, Mapping):
            return schema is False

        def every(schemas: Iterable[Any]) -> bool:
            return all(self._is_as_in_json(each, seen) for each in schemas)

        if isinstance(reference := schema.get("$ref"), str):
            target = referred(self._parameters, reference)
            return reference in seen or self._is_as_in_json(target, seen | {reference})
        if "const" in schema or "enum" in schema:
            return all(map(_has_neither, [schema["const"]] if "const" in schema else schema["enum"]))
        for word in ("anyOf", "oneOf"):
            if word in schema and every(schema[word]):
                return True
        if any(self._is_as_in_json(each, seen) for each in schema.get("allOf", ())):
            return True
        named = schema.get("type", _TYPES)
        for name in [named] if isinstance(named, str) else named:
            if name == "array":
                fits = every((schema.get("items", True), *schema.get("prefixItems", ())))
            elif name == "object":
                kinds = (schema.get(word, {}).values() for word in ("properties", "patternProperties"))
                fits = every(
                    (schema.get("additionalProperties", True), *(each for kind in kinds for each in kind))
                )
            else:
                fits = name in _SCALARS
            if not fits:
                return False
        return True


def _refuse_beside(schema: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ValueError with the words that cannot be enforced, as the compiler of JSON schemas does."""
    if unknown := sorted(set(schema) - SAYS_NOTHING - set(known)):
        raise ValueError(f"Unimplemented keys: {json.dumps(unknown)}")


def _properties(schema: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """By name, each property's schema and whether it is required. A required name need not be among the properties."""
    required, free = schema.get("required") or (), schema.get("additionalProperties", True)
    found = {key: (held, key in required) for key, held in (schema.get("properties") or {}).items()}
    return found | {key: (free, True) for key in required if key not in found}


def _has_neither(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_has_neither, value.values()))
    if isinstance(value, list):
        return all(map(_has_neither, value))
    return value is not None and not isinstance(value, bool)


def _is_of(value: Any, types: frozenset[str] | None) -> bool:
    (name,) = argument_types({"properties": {"a": {"const": value}}}, "a") or ("",)
    return types is None or name in types or (name == "integer" and "number" in types)


def _python(value: Any) -> str:
    """The value as Python writes it, but with JSON's quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_python(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
