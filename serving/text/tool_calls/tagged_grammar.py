"""The grammar of one call that has tags around each argument.

Arguments come in the order of their schema's properties. An argument that is not a string is held to its schema, a
string to its schema's values, pattern and length. An argument that may be a string or something else is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from serving.text.tool_calls.argument_values import argument_types, referred
from serving.text.tool_calls.formats import TaggedFormat
from serving.text.tool_calls.grammar_terms import DEFINITIONS, GrammarTerms

_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_TEXT = re.compile(r"\\.|/|\n", re.DOTALL)
"""The parts of a pattern that could be mistaken for its own delimiters."""


def tagged_call(
    form: TaggedFormat, terms: GrammarTerms, name: str, parameters: Mapping[str, Any]
) -> list[str]:
    """The text of a call between its head and its tail, and the rules that it needs. The rules' names begin with
    `name`."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    rules, names = [], []
    for index, key in enumerate(properties):
        rule = f"{name}_{index}"
        value, *further = _value(form, terms, rule, parameters, key)
        begin = terms.literal(f"{form.key_opener}{key}{form.key_closer}")
        rules += [f"{rule}: {begin} {value}", *further]
        names.append(rule if key in required else f"{rule}?")
    if not properties and parameters.get("additionalProperties", True) is not False:
        free, *further = _either(form, terms, f"{name}_text", {})
        begin, between = terms.literal(form.key_opener), terms.literal(form.key_closer)
        rules += [f"{name}_any: {begin} {name.upper()}_KEY {between} {free}", f"{name.upper()}_KEY: {_KEY}"]
        rules += further
        names.append(f"{name}_any*")
    return [" ".join(names), *rules]


def _value(
    form: TaggedFormat, terms: GrammarTerms, rule: str, parameters: Mapping[str, Any], key: str
) -> list[str]:
    """The text between a key and its value, the value, and what ends it; then the rules."""
    types = argument_types(parameters, key)
    held = parameters["properties"][key]
    shared = {word: parameters[word] for word in DEFINITIONS if word in parameters}
    if types is not None and "string" not in types:
        return [_json(form, terms, {**shared, **held})]
    if not isinstance(held, Mapping):
        return _either(form, terms, f"{rule}_text", {})
    if types is None or len(types) > 1:
        return _either(form, terms, f"{rule}_text", {**shared, **held})
    schemas = _string_schemas(held, parameters)
    values = [_values(schema) for schema in schemas]
    if all(values):
        texts = " | ".join(terms.literal(value) or '""' for value in chain(*values))
        begin = terms.literal(_before(form, is_string=True))
        return [f"{begin} ({texts}) {terms.literal(form.behind_value)}"]
    regexes = [_regex(schema, form.value_closer) for schema in schemas]
    return _text(form, terms, f"{rule}_text", " | ".join(f"({regex})" for regex in regexes))


def _string_schemas(held: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas, without references, of which a string must fit one. `held` is known to allow strings only."""
    if isinstance(reference := held.get("$ref"), str):
        beside = {word: value for word, value in held.items() if word != "$ref"}
        return _string_schemas({**referred(root, reference), **beside}, root)
    choices = held.get("anyOf", held.get("oneOf"))
    if choices is None or _values(held) or "type" in held:
        return [held]
    return [schema for choice in choices for schema in _string_schemas(choice, root)]


def _values(schema: Mapping[str, Any]) -> Sequence[str]:
    """The only strings that fit, if the schema names them."""
    return [schema["const"]] if "const" in schema else schema.get("enum") or ()


def _json(form: TaggedFormat, terms: GrammarTerms, schema: Mapping[str, Any]) -> str:
    begin = terms.literal(_before(form, is_string=False))
    return f"{begin} {terms.schema(schema)} {terms.literal(form.behind_value)}"


def _either(form: TaggedFormat, terms: GrammarTerms, rule: str, schema: Mapping[str, Any]) -> list[str]:
    """A string, or a value of the schema; free where the format does not tell the two apart."""
    text, *further = _text(form, terms, rule, _regex({}, form.value_closer))
    return [f"({text} | {_json(form, terms, schema)})" if form.string_opener else text, *further]


def _before(form: TaggedFormat, *, is_string: bool) -> str:
    """The text after the key's own end."""
    return form.before_value(is_string=is_string).removeprefix(form.key_closer)


def _regex(schema: Mapping[str, Any], closer: str) -> str:
    """A pattern for a string, which never contains the tag that ends it. Special tokens are not text, so the pattern
    neither contains nor excludes them."""
    wanted = ["/(?s:.*)/", f"~/(?s:.*){_delimited(re.escape(closer))}(?s:.*)/"]
    if values := _values(schema):
        wanted.append(f"/({'|'.join(_delimited(re.escape(value)) for value in values)})/")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is not None or most is not None:
        wanted.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(pattern := schema.get("pattern"), str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^") if end else pattern.removeprefix("^")[:-1]
        wanted.append(f"/{begin}({_delimited(inner)}){end}/")
    return " & ".join(wanted)


def _delimited(pattern: str) -> str:
    """The pattern as it can stand between slashes, on one line."""
    return _TEXT.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)


def _text(form: TaggedFormat, terms: GrammarTerms, rule: str, regex: str) -> list[str]:
    """What comes before free text, the text, and what ends it; then their rules."""
    begin, terminal = terms.literal(_before(form, is_string=True)), rule.upper()
    parts = terms.at_token(form.behind_value)
    if parts is None:
        suffix = json.dumps(form.behind_value)
        return [f"{begin} {rule}", f"{rule}[suffix={suffix}]: {terminal}", f"{terminal}: {regex}"]
    before, rest = parts
    text = f"{terminal}_TEXT {json.dumps(before)}" if before else f"{terminal}_TEXT"
    rules = [f"{rule}: {terminal}", f"{terminal}: {text}", f"{terminal}_TEXT: {regex}"]
    return [f"{begin} {rule} {terms.literal(rest)}", *rules]
