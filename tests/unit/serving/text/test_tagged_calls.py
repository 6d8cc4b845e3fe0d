"""Calls with tags around each argument are found in every format that has them, however the answer was cut. An answer
that is held to calls contains such calls."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from serving.grammars.grammars import Grammars
from serving.text.answer_pieces import CallPiece, Piece
from serving.text.tool_calls.formats import TAGGED_FORMATS, FormatName
from serving.text.tool_calls.tagged_parser import TaggedCallParser
from tests.unit.serving.held_outputs import any_output, grammars_of, held_to_calls, takes
from tests.unit.serving.small_tokenizer import byte_level_tokenizer
from tests.unit.serving.tool_texts import cut, read

STRING = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {}},
    "look": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}}},
}
BERN, RAIN = '{"city": "Bern"}', '{"city": "Bern", "days": 3}'
QWEN = (
    "<tool_call>\n<function=look>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
QWEN_F = "<function=f>\n</function>"
DSML_CITY = '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
DSML_DAYS = '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
DSML_F = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>'
DSML = f'<｜DSML｜invoke name="look">\n{DSML_CITY}{DSML_DAYS}</｜DSML｜invoke>'
DSML_BEGIN, DSML_END = "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"
GLM = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"


def told(name: FormatName, *parts: str) -> list[Piece]:
    return read(TaggedCallParser(TAGGED_FORMATS[name], SCHEMAS), *parts)


def call(index: int, name: str = "f", arguments: str = "{}") -> CallPiece:
    return CallPiece(index, name, arguments)


FOUND: list[tuple[FormatName, str, list[Piece]]] = [
    ("qwen3_coder", QWEN, [call(0, "look", RAIN)]),
    (
        "qwen3_coder",
        f"I look.\n\n{QWEN}\n{QWEN}\n",
        ["I look.", call(0, "look", RAIN), call(1, "look", RAIN)],
    ),
    ("qwen3_coder", f"{QWEN} So.", [call(0, "look", RAIN), " So."]),
    ("qwen3_coder", QWEN_F + QWEN_F, [call(0), call(1)]),
    ("qwen3_coder", f"<tool_call>{QWEN_F}", [call(0)]),
    ("qwen3_coder", f"{QWEN}\n<tool_c", [call(0, "look", RAIN)]),
    ("qwen3_coder", QWEN.partition("\n</parameter>")[0], [call(0, "look", '{"city": "Bern')]),
    ("qwen3_coder", QWEN.partition("ter>\n<par")[0], [call(0, "look", '{"city": "Bern')]),
    (
        "qwen3_coder",
        "<function=look><parameter=city>\n\n</parameter></function>",
        [call(0, "look", '{"city": ""}')],
    ),
    (
        "qwen3_coder",
        "<function=look>\n<parameter=city>\n\n a <b> </p\n\n\n</parameter>\n</function>",
        [call(0, "look", json.dumps({"city": "\n a <b> </p\n\n"}))],
    ),
    (
        "qwen3_coder",
        "<function=look>huh<parameter=days>\nsoon\n</parameter>",
        [call(0, "look", '{"days": "soon"')],
    ),
    ("qwen3_coder", "<function=g><parameter=x>[1]</parameter></function>", [call(0, "g", '{"x": [1]}')]),
    ("glm45", f"{GLM}\n{GLM}", [call(0, "look", BERN), call(1, "look", BERN)]),
    ("glm45", f"Sure. {GLM}\nDone.", ["Sure.", call(0, "look", BERN), "\nDone."]),
    ("glm45", "<tool_call>f\n</tool_call>", [call(0)]),
    ("glm45", "<tool_call>f</tool_call>", [call(0)]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>huh</tool_call>", [call(0)]),
    ("glm47", GLM.replace("\n", ""), [call(0, "look", BERN)]),
    ("glm47", GLM.replace("</tool_call>", GLM), [call(0, "look", BERN), call(1, "look", BERN)]),
    (
        "deepseek_v32",
        f"I look.\n\n{DSML_BEGIN}{DSML}\n{DSML_F}{DSML_END}",
        ["I look.", call(0, "look", RAIN), call(1)],
    ),
    ("deepseek_v32", f"{DSML_BEGIN}{DSML_F}{DSML_END}\nDone.", [call(0), "\nDone."]),
    ("deepseek_v32", f"{DSML_F}\n{DSML_F} So.", [call(0), call(1), " So."]),
    ("deepseek_v32", f"{DSML_BEGIN}{DSML_F}\n</｜DSML｜func", [call(0)]),
    ("deepseek_v32", f"{DSML_BEGIN}{DSML_F}{DSML_END}\n\n{DSML_BEGIN}{DSML_F}", [call(0), call(1)]),
    ("deepseek_v32", DSML.partition("</｜DSML｜par")[0], [call(0, "look", '{"city": "Bern')]),
    (
        "deepseek_v32",
        DSML.replace('"true">Bern', '"true">3 </｜DSML｜ "<b>"').replace('"false">3', '"true">3'),
        [call(0, "look", '{"city": "3 </｜DSML｜ \\"<b>\\"", "days": "3"}')],  # marked as a string
    ),
    (
        "deepseek_v32",
        DSML.replace('"true">Bern', '"false">[1, {"a": null}]').replace('"false">3', '"false"> soon'),
        [call(0, "look", '{"city": [1, {"a": null}], "days": " soon"}')],
    ),
    ("deepseek_v32", DSML.replace('"false">3', '"false">"3"'), [call(0, "look", RAIN.replace("3", '"3"'))]),
    ("deepseek_v32", DSML.replace('string="true"', 'string="so"'), [call(0, "look", '{"days": 3}')]),
]
PLAIN: list[tuple[FormatName, str]] = [
    *[(name, text) for name in TAGGED_FORMATS for text in ("", "hello", " \n ", "a\n\n", "<", "<tool_call>")],
    ("qwen3_coder", "<tool_call>\n{}</tool_call>"),
    ("qwen3_coder", "<function=two words>"),
    ("qwen3_coder", "<function=>"),
    ("qwen3_coder", "<parameter=a>b</parameter>"),
    ("qwen3_coder", f"<function={'f' * 600}>"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("glm45", "<tool_call><arg_key>a</arg_key>"),
    ("glm45", "<tool_call>f\n"),
    ("deepseek_v32", f"{DSML_BEGIN}{DSML_END}"),
    ("deepseek_v32", f"{DSML_BEGIN} and words"),
    ("deepseek_v32", '<｜DSML｜invoke name="two words">'),
    ("deepseek_v32", "｜DSML｜"),
]


@pytest.mark.parametrize(("name", "text", "expected"), FOUND)
def test_calls_are_found(name: FormatName, text: str, expected: list[Piece]) -> None:
    assert told(name, text) == expected
    assert told(name, *text) == expected


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_is_content(name: FormatName, text: str) -> None:
    expected = [text] if text else []
    assert told(name, text) == expected
    assert told(name, *text) == expected


@pytest.mark.parametrize("length", range(498, 515))
def test_long_names_are_read_alike_however_they_come(length: int) -> None:
    """A key before a long mark used to be an argument only if all of it came at once."""
    long = "x" * length
    for name, text in (
        ("glm45", f"<tool_call>f\n<arg_key>{long}</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("deepseek_v32", DSML.replace('"city"', f'"{long}"')),
        ("deepseek_v32", DSML.replace('"look"', f'"{long}"')),
    ):
        assert told(name, *text) == told(name, text)


def test_a_string_is_told_as_it_comes_and_a_number_when_it_is_whole() -> None:
    parser = TaggedCallParser(TAGGED_FORMATS["qwen3_coder"], SCHEMAS)
    assert parser.push("<function=look><parameter=city>\nBe") == [
        call(0, "look", ""),
        CallPiece(0, None, '{"city": '),
        CallPiece(0, None, '"'),
        CallPiece(0, None, "Be"),
    ]
    assert parser.push("rn") == [CallPiece(0, None, "rn")]
    assert parser.push("</parameter><parameter=days>1") == [
        CallPiece(0, None, '"'),
        CallPiece(0, None, ', "days": '),
    ]
    assert parser.push("2</parameter>") == [CallPiece(0, None, "12")]


SCRAPS = [
    *(DSML_BEGIN.strip(), DSML_END.strip(), DSML, DSML_F, "<｜DSML｜"),
    *('<｜DSML｜invoke name="look">', '<｜DSML｜parameter name="city" string="', "</｜DSML｜invoke>"),
    *('true">', 'false">', "</｜DSML｜parameter>"),
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "f", "look", " ", "\n", "<", ">", "words", '"', "\\"),
    *("<function=f>", "<function=look>", "<function=", "</function>", "<parameter=city>", "<parameter=days>"),
    *(
        "\n</parameter>\n",
        "</parameter>",
        "</param",
        "<arg_key>city</arg_key>",
        "<arg_key>",
        "</arg_key>",
        "12",
    ),
    *("<arg_value>", "</arg_value>", "<arg_value>3</arg_value>", "<arg_", "<parameter=", "😀"),
]


@settings(max_examples=1200, deadline=None, print_blob=True)
@given(
    name=st.sampled_from(sorted(TAGGED_FORMATS)),
    text=st.lists(st.sampled_from(SCRAPS), max_size=16).map("".join),
    places=st.lists(st.integers(0, 160), max_size=12),
)
def test_any_cut_tells_the_same(name: FormatName, text: str, places: list[int]) -> None:
    whole = told(name, text)
    assert told(name, *cut(text, places)) == whole
    assert told(name, *text) == whole


values = {
    "words": ({"type": "string"}, st.text()),
    "number": ({"type": "integer"}, st.integers()),
    "list": ({"type": "array"}, st.lists(st.text() | st.booleans() | st.none(), max_size=4)),
    "object": ({"type": "object"}, st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3)),
}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(TAGGED_FORMATS)),
    st.lists(
        st.fixed_dictionaries({}, optional={k: v for k, (_, v) in values.items()}), min_size=1, max_size=3
    ),
)
def test_calls_as_the_format_has_them_are_all_found(name: FormatName, calls: list[dict[str, object]]) -> None:
    form = TAGGED_FORMATS[name]
    schema = {"type": "object", "properties": {key: held for key, (held, _) in values.items()}}
    written = []
    for arguments in calls:
        shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        if any(form.value_closer in text for text in shown.values()):
            return
        tags = [
            f"{form.key_opener}{k}{form.before_value(is_string=k == 'words')}{v}{form.behind_value}"
            for k, v in shown.items()
        ]
        written.append(f"{form.head('do')}{''.join(tags)}{form.tail}")
    pieces = read(
        TaggedCallParser(form, {"do": schema}), form.prefix + form.between.join(written) + form.suffix
    )
    found = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert found == pieces
    assert [(piece.index, piece.name) for piece in found] == [(i, "do") for i in range(len(calls))]
    assert [json.loads(piece.arguments) for piece in found] == calls


SHORT = {"type": "string", "maxLength": 8}
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
            "unit": {"enum": ["C", "a <b>\n"]},
            "fixed": {"const": "x/y"},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["code", "place"],
        "$defs": {"place": {"type": "object", "properties": {"x": SHORT}, "additionalProperties": False}},
    },
    # Strings behind references, as pydantic writes an Enum, were free.
    {
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/unit", "description": "of temperature"},
            "again": {"$ref": "#/$defs/again"},
            "short": {"$ref": "#/$defs/short"},
            "either": {"anyOf": [{"$ref": "#/$defs/unit"}, {"const": "a/b"}]},
            "any": {
                "oneOf": [{"type": "string", "pattern": "^x{1,3}$"}, {"type": "string", "enum": ["y|z"]}]
            },
        },
        "required": ["unit", "again", "short", "either", "any"],
        "$defs": {
            "unit": {"type": "string", "enum": ["C", "F"]},
            "again": {"$ref": "#/$defs/unit"},
            "short": SHORT,
        },
    },
]


@functools.cache
def grammars_for(name: FormatName, *, marks: bool) -> tuple[PreTrainedTokenizerFast, Grammars]:
    """A tokenizer, with or without tokens for the format's marks, and its grammars."""
    tokenizer = byte_level_tokenizer()
    if marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(TAGGED_FORMATS[name].shown_tokens)})
    return tokenizer, grammars_of(tokenizer)


@pytest.mark.parametrize("schema", HELD)
@pytest.mark.parametrize("marks", [False, True], ids=["texts", "special_tokens"])
@pytest.mark.parametrize("name", TAGGED_FORMATS)
def test_an_answer_that_is_held_to_calls_has_arguments_of_their_schemas(
    name: FormatName, marks: bool, schema: dict[str, Any]
) -> None:
    """Random walks through what is allowed, without a model."""
    form, (tokenizer, grammars) = TAGGED_FORMATS[name], grammars_for(name, marks=marks)
    for seed in range(8):
        out = any_output(held_to_calls(grammars, name, {"do": schema}), seed)
        text = tokenizer.decode(out, skip_special_tokens=False)
        pieces = read(TaggedCallParser(form, {"do": schema}), text)
        assert pieces, text
        for piece in pieces:
            assert isinstance(piece, CallPiece), (text, piece)
            jsonschema.validate(json.loads(piece.arguments), schema)


TEXTS: dict[str, tuple[dict[str, Any], Any]] = {
    "a string": ({"type": "string"}, "a </b < x</"),
    "either, a string": ({"type": ["integer", "string"]}, "a </b <"),
    "either, a number": ({"type": ["integer", "string"]}, 3),
    "anything": ({}, [{"a": "b"}]),
    "anything at all": (True, "words"),
}


@pytest.mark.parametrize("told_by", ["its schema", "none"])
@pytest.mark.parametrize(("schema", "value"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("marks", [False, True], ids=["texts", "special_tokens"])
@pytest.mark.parametrize("name", TAGGED_FORMATS)
def test_free_text_ends_where_its_mark_does(
    name: FormatName, marks: bool, schema: dict[str, Any], value: Any, told_by: str
) -> None:
    """The token that ends a text without a limit used to be taken for a part of the text, so the call never ended."""
    form, (tokenizer, grammars) = TAGGED_FORMATS[name], grammars_for(name, marks=marks)
    parameters = {"type": "object", **({"properties": {"x": schema}} if told_by == "its schema" else {})}
    held = held_to_calls(grammars, name, {"do": parameters}, parallel=False)
    before = form.before_value(is_string=isinstance(value, str))
    shown = value if isinstance(value, str) else json.dumps(value)
    call = f"{form.head('do')}{form.key_opener}x{before}{shown}{form.behind_value}{form.tail}"
    text = f"{form.prefix}{call}{form.suffix}"
    assert takes(held, tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    assert held.complete or held.may_end
    (piece,) = read(TaggedCallParser(form, {"do": parameters}), text)
    assert isinstance(piece, CallPiece)
    assert json.loads(piece.arguments) == {"x": value}
