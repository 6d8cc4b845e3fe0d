"""The grammar of one call that has tags around each argument.

Arguments come in the order of their schema's properties. An argument that is no string is held to its schema, a string
to its schema's values, pattern and length; what may be a string or something else is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.text.tool_calls.argument_values import argument_types
from serving.text.tool_calls.formats import TaggedFormat
from serving.text.tool_calls.grammar_terms import GrammarTerms

_DEFINITIONS = ("$defs", "definitions")
_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_TEXT = re.compile(r"\\.|/|\n", re.DOTALL)
"""What a pattern has that its own delimiters could be taken for."""


def tagged_call(
    form: TaggedFormat, terms: GrammarTerms, name: str, parameters: Mapping[str, Any]
) -> list[str]:
    """What a call has between its head and its tail, and the rules that this needs. `name` begins the rules' names."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    rules, names = [], []
    for index, key in enumerate(properties):
        rule = f"{name}_{index}"
        value, *further = _value(form, terms, rule, parameters, key)
        begin = terms.literal(f"{form.key_opener}{key}{form.before_value}")
        rules += [f"{rule}: {begin} {value}", *further]
        names.append(rule if key in required else f"{rule}?")
    if not properties and parameters.get("additionalProperties", True) is not False:
        free, *further = _text(form, terms, f"{name}_text", _regex({}, form.value_closer))
        begin, between = terms.literal(form.key_opener), terms.literal(form.before_value)
        rules += [f"{name}_any: {begin} {name.upper()}_KEY {between} {free}", f"{name.upper()}_KEY: {_KEY}"]
        rules += further
        names.append(f"{name}_any*")
    return [" ".join(names), *rules]


def _value(
    form: TaggedFormat, terms: GrammarTerms, rule: str, parameters: Mapping[str, Any], key: str
) -> list[str]:
    """A value and what ends it; then rules."""
    types = argument_types(parameters, key)
    held = parameters["properties"][key]
    if types is not None and "string" not in types:
        shared = {word: parameters[word] for word in _DEFINITIONS if word in parameters}
        return [f"{terms.schema({**shared, **held})} {terms.literal(form.behind_value)}"]
    if types is None or len(types) > 1 or not isinstance(held, Mapping):
        return _text(form, terms, f"{rule}_text", _regex({}, form.value_closer))
    values = [held["const"]] if "const" in held else held.get("enum")
    if values:
        texts = " | ".join(terms.literal(value) or '""' for value in values)
        return [f"({texts}) {terms.literal(form.behind_value)}"]
    return _text(form, terms, f"{rule}_text", _regex(held, form.value_closer))


def _regex(schema: Mapping[str, Any], closer: str) -> str:
    """Of a string, which never has the tag that ends it."""
    wanted = [f"~/(?s:.*){_delimited(re.escape(closer))}(?s:.*)/"]
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
    """As it can stand between slashes, on one line."""
    return _TEXT.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)


def _text(form: TaggedFormat, terms: GrammarTerms, rule: str, regex: str) -> list[str]:
    """Free text and what ends it; then the rules of these."""
    terminal = rule.upper()
    if terms.is_special(form.value_closer):
        frame = terms.literal(form.behind_value)
        return [f"{rule} {frame}", f"{rule}: {terminal}", f"{terminal}: {regex}"]
    suffix = json.dumps(form.behind_value)
    return [rule, f"{rule}[suffix={suffix}]: {terminal}", f"{terminal}: {regex}"]
