"""Calls in Python's syntax are found however the answer was cut. An answer that is held to calls is read as it was
meant."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import TokenConstraint
from serving.text.answer_pieces import CallPiece, Piece
from serving.text.tool_calls.formats import PYTHONIC
from serving.text.tool_calls.python_literals import literal_json
from serving.text.tool_calls.pythonic_parser import PythonicCallParser
from tests.unit.serving.held_outputs import any_output, grammars_of, held_to_calls, takes
from tests.unit.serving.small_tokenizer import byte_level_tokenizer
from tests.unit.serving.tool_texts import cut, read

START, END = "<|python_start|>", "<|python_end|>"
TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": [START, END]})
GRAMMARS = grammars_of(TOKENIZER)


def told(*parts: str) -> list[Piece]:
    return read(PythonicCallParser(PYTHONIC), *parts)


def call(index: int, name: str = "f", arguments: str = "{}") -> CallPiece:
    return CallPiece(index, name, arguments)


WEATHER = '[get_weather(city="Paris", days=3), other(x=[1, {"a": None}])]'
TOLD = [call(0, "get_weather", '{"city": "Paris", "days": 3}'), call(1, "other", '{"x": [1, {"a": null}]}')]
FOUND: list[tuple[str, list[Piece]]] = [
    (WEATHER, [*TOLD]),
    (f"{START}{WEATHER}{END}", [*TOLD]),
    (f"\n{START} {WEATHER}\n{END}\n", [*TOLD]),
    (f"I look. {START}{WEATHER}", ["I look.", *TOLD]),
    (f" {WEATHER} So.", [*TOLD, " So."]),
    (f"{START}{WEATHER}{END} So.", [*TOLD, " So."]),
    ("[f(), g()]", [call(0), call(1, "g")]),
    ("[f(),\n  g(),\n]\n", [call(0), call(1, "g")]),
    ("[f()]\n[g()]", [call(0), call(1, "g")]),
    (f"{START}[f()]{END}{START}[g()]{END}", [call(0), call(1, "g")]),
    ("[a.b-c:d/e( x = 1 , y-z = 2 )]", [call(0, "a.b-c:d/e", '{"x": 1, "y-z": 2}')]),
    (
        "[f(a='it\\'s', b=\"]), (\", c=(1, 2))]",
        [call(0, arguments='{"a": "it\'s", "b": "]), (", "c": [1, 2]}')],
    ),
    (
        "[f(a=True, b=false, c=None, d=null)]",
        [call(0, arguments='{"a": true, "b": false, "c": null, "d": null}')],
    ),
    ("[f(a=[[], {}, {'b': (')',)}])]", [call(0, arguments='{"a": [[], {}, {"b": [")"]}]}')]),
    ("[f(a=-1.5e3, b=1e999, c=0x10)]", [call(0, arguments='{"a": -1.5e3, "b": 1e999, "c": 16}')]),
    ("[f(a=Paris, b=g(1, 2), c=)]", [call(0, arguments='{"a": "Paris", "b": "g(1, 2)", "c": ""}')]),
    ("[f(a='two\nlines')]", [call(0, arguments='{"a": "two\\nlines"}')]),
    ('[f(a=1, "b", **{"c": 2}, d == 3, e=4)]', [call(0, arguments='{"a": 1, "e": 4}')]),
    ("[f(a=1]", [call(0, arguments='{"a": 1}')]),
    ("[f(a=1)", [call(0, arguments='{"a": 1}')]),
    ("[f(a=1, b=2", [call(0, arguments='{"a": 1')]),
    ("[f(a=1), 5]", [call(0, arguments='{"a": 1}'), ", 5]"]),
    ("[f(a=1) and", [call(0, arguments='{"a": 1}'), " and"]),
    ("[f()][]", [call(0), "[]"]),
    (f"[f()]{END}[g()]", [call(0), "[g()]"]),
]
PLAIN = [
    *(
        "",
        "hello",
        " \n ",
        "a\n\n",
        "}",
        "<",
        "[",
        "[]",
        "[1, 2]",
        "f(a=1)",
        "[f",
        "[f(",
        "[f(a",
        "[f(a=",
        "[f(a ==",
    ),
    *("[f(1)]", "[f(a == 1)]", "[see](a=1)", "[Note: (a=1)]", "He said: [f(a=1)]", f"[{'f' * 1100}()]"),
    *(START, f"{START}print(1)", f"{START}[1, 2]{END}", f"a {START} is a token", "  <|python_st", '["f()"]'),
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_calls_are_found(text: str, expected: list[Piece]) -> None:
    assert told(text) == expected
    assert told(*text) == expected


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_content(text: str) -> None:
    expected = [text] if text else []
    assert told(text) == expected
    assert told(*text) == expected


def test_an_argument_is_told_when_it_is_whole() -> None:
    parser = PythonicCallParser(PYTHONIC)
    assert parser.push("[f(city") == []
    assert parser.push("='Pa") == [CallPiece(0, "f", "")]
    assert parser.push("ris', days=3") == [CallPiece(0, None, '{"city": "Paris"')]
    assert parser.push("0)") == [CallPiece(0, None, ', "days": 30'), CallPiece(0, None, "}")]
    assert parser.push("]") == parser.flush() == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('"\\ud83d\\ude00"', '"\\ud83d\\ude00"'),
        ("'\\ud83d'", '"\\ud83d"'),
        ("'\\d+'", '"\\\\d+"'),
        (
            '["None", None, {"\\\\": True, "\\"False": 1e999}]',
            '["None", null, {"\\\\": true, "\\"False": 1e999}]',
        ),
        ('"' + '\\"' * 50_000, json.dumps('"' + '\\"' * 50_000)),
        ("{1: 2}", '{"1": 2}'),
        ("{1, 2}", '"{1, 2}"'),
        ("[" * 100_000, json.dumps("[" * 100_000)),
        ("b'x'", "\"b'x'\""),
        ("1" * 5000, "1" * 5000),
        ("[NaN]", '"[NaN]"'),
        ("-" * 60_000 + "1", json.dumps("-" * 60_000 + "1")),
    ],
)
def test_any_argument_is_json(text: str, shown: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literal_json(text) == shown


SCRAPS = [
    *("[", "]", "(", ")", "{", "}", ",", "=", "'", '"', "\\", " ", "\n", ":", "f", "a", "1", "words", "😀"),
    *(
        START,
        END,
        "<|python",
        "_start|>",
        "f(",
        "[f(",
        "a=",
        "[f(a=1)",
        ", b='x'",
        "[g()]",
        ")]",
        "None",
        WEATHER,
    ),
]


@settings(max_examples=1200, deadline=None, print_blob=True)
@given(
    text=st.lists(st.sampled_from(SCRAPS), max_size=16).map("".join),
    places=st.lists(st.integers(0, 160), max_size=12),
)
def test_any_cut_tells_the_same(text: str, places: list[int]) -> None:
    whole = told(text)
    assert told(*cut(text, places)) == whole
    assert told(*text) == whole


values = st.recursive(
    st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
calls_made = st.lists(
    st.tuples(
        st.integers(1, 480).map(lambda length: ("get.a-b_" * 75)[:length]),
        st.dictionaries(st.from_regex(r"[a-z_]\w{0,8}", fullmatch=True), values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(calls_made)
def test_calls_as_the_format_has_them_are_all_found(calls: list[tuple[str, dict[str, object]]]) -> None:
    form = PYTHONIC
    written = []
    for name, arguments in calls:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        written.append(f"{form.head(name)}{shown}{form.tail}")
    pieces = told(form.prefix + form.between.join(written) + form.suffix)
    found = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert found == pieces
    assert [(piece.index, piece.name) for piece in found] == [(i, n) for i, (n, _) in enumerate(calls)]
    assert [json.loads(piece.arguments) for piece in found] == [a for _, a in calls]


@pytest.mark.parametrize("scrap", ["[", "[f(a=", "f(a='x', ", "(", " ", "'", "\\", "a=1, "])
@pytest.mark.parametrize("begun", ["", "[f(a="])
def test_time_is_linear_in_the_answer(scrap: str, begun: str) -> None:
    parser = PythonicCallParser(PYTHONIC)
    parser.push(begun)
    started_s = time.process_time()
    for _ in range(20_000):
        parser.push(scrap)
    parser.flush()
    assert time.process_time() - started_s < 5.0


def held_to(*functions: dict[str, Any]) -> TokenConstraint:
    return held_to_calls(GRAMMARS, "pythonic", {f"do_{i}": schema for i, schema in enumerate(functions)})


def allows(schema: dict[str, Any], arguments: str) -> bool:
    held = held_to({"type": "object", **schema})
    return takes(held, TOKENIZER.encode(f"[do_0({arguments})]", add_special_tokens=False)) and held.may_end


SHORT = {"type": "string", "maxLength": 8}
FLAG = {"type": "boolean"}
NODE = {
    "type": "object",
    "properties": {"flag": FLAG, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
}
HELD: list[dict[str, Any]] = [
    {"type": "object", "additionalProperties": False},
    {
        "type": "object",
        "properties": {"city": SHORT, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^a/[bc]{2,3}$"},
            "unit": {"enum": ["C", 'a "b"\n', None, True, {"a": [False, 1.5]}]},
            "odd": {"type": ["integer", "null"], "enum": [1, None, "x"]},
            "fixed": {"const": "x/y"},
            "place": {"$ref": "#/$defs/place"},
            "maybe": {"type": ["string", "null", "boolean"], "maxLength": 3, "description": "Words."},
            "list": {"type": "array", "items": FLAG, "minItems": 1, "maxItems": 3},
            "map": {"type": "object", "additionalProperties": {"anyOf": [FLAG, {"const": None}]}},
            "either": {"oneOf": [{"type": "null"}, {"type": "array", "items": SHORT, "maxItems": 2}]},
            "same": {"allOf": [{"$ref": "#/$defs/node"}]},
        },
        "required": ["code", "place", "same"],
        "additionalProperties": False,
        "$defs": {
            "place": {"type": "object", "properties": {"x": SHORT}, "additionalProperties": False},
            "node": NODE,
        },
    },
    {"type": "object", "properties": {"a": {**NODE, "required": ["flag", "more"]}}, "$defs": {"node": NODE}},
]


@pytest.mark.parametrize("schema", HELD)
def test_an_answer_that_is_held_to_calls_has_arguments_of_their_schemas(schema: dict[str, Any]) -> None:
    """Random walks through what is allowed, without a model."""
    for seed in range(12):
        held = held_to(schema, HELD[0])
        out = any_output(held, seed, most=2000)
        if not (held.complete or held.may_end):
            continue
        text = TOKENIZER.decode(out, skip_special_tokens=False)
        pieces = told(text)
        assert pieces, text
        for piece in pieces:
            assert isinstance(piece, CallPiece), (text, piece)
            jsonschema.validate(json.loads(piece.arguments), schema if piece.name == "do_0" else HELD[0])


def test_what_the_grammar_of_calls_allows() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": FLAG, "c": {}}, "required": ["b"]}
    for arguments in (
        "a=1, b=True",
        "b=False",
        "b=True,c='x'",
        'b=True, c=[None, {"a": (',
        "b=True, c={'d': 1.5}",
    ):
        assert allows(schema, arguments) == ("(" not in arguments), arguments
    for arguments in ("", "a=1", "b=true", "b=1", "b=True, a=1", "a='1', b=True", "b=True, d=1", "b=True, "):
        assert not allows(schema, arguments), arguments
    assert allows({}, "any=1, thing=None")
    assert allows({"additionalProperties": FLAG}, "x=True")
    assert not allows({"additionalProperties": FLAG}, "x=1")
    assert allows(
        {"properties": {"a": {"type": "object", "properties": {"b": FLAG, "c": FLAG}}}}, 'a={"c": True}'
    )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a b": {}}}, '"a b" cannot be the name of an argument'),
        ({"minProperties": 1}, r'Unimplemented keys: \["minProperties"\]'),
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            r'Unimplemented keys: \["uniqueItems"\]',
        ),
        ({"properties": {"a": {"not": {}}}}, r'Unimplemented keys: \["not"\]'),
        ({"properties": {"a": {"type": "array", "items": SHORT, "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"oneOf": [FLAG, {}]}}}, "oneOf: its schemas may have values in common"),
        ({"properties": {"a": {"allOf": [FLAG, FLAG]}}}, r'Unimplemented keys: \["allOf"\]'),
        ({"properties": {"a": {"anyOf": [FLAG], "type": "boolean"}}}, r'Unimplemented keys: \["type"\]'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "refers to nothing"),
        ({"properties": {"a": {"type": ["bool", "null"]}}}, '"bool" is no type'),
        ({"properties": {"a": {"type": "boolean", "enum": ["x", None]}}}, "allows nothing"),
        ({"required": ["a"], "additionalProperties": False}, "allows nothing"),
        ({"properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}, "allows nothing"),
        ({"properties": 5}, "no JSON schema"),
        ({"properties": {"a": {"type": "boolean", "enum": 5}}}, "no JSON schema"),
        ({"properties": {"a": {"anyOf": 5}}}, "no JSON schema"),
        ({"properties": {"a": {"type": ["array", "null"], "minItems": "x"}}}, "no JSON schema"),
    ],
)
def test_what_cannot_be_written_so_is_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        held_to({"type": "object", **schema})
