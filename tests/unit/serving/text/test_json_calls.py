"""Function calls are found in answers of every format. They depend on the text alone, not on how it was cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.answer_pieces import CallPiece, Piece
from serving.text.tool_calls.formats import JSON_FORMATS, FormatName
from serving.text.tool_calls.json_parser import JsonCallParser
from tests.unit.serving.tool_texts import cut, read_json_calls, texts

WEATHER = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
LLAMA = WEATHER.replace("arguments", "parameters")
BERN = '{"city": "Bern"}'
NESTED = '{"name": "write", "arguments": {"text": "a } \\"</tool_call>\\" ] \\\\", "at": [{"line": 1}]}}'
IN_NESTED = NESTED[len('{"name": "write", "arguments": ') : -1]


def call(index: int, arguments: str = BERN, name: str = "get_weather") -> CallPiece:
    return CallPiece(index, name, arguments)


FOUND: list[tuple[FormatName, str, list[Piece]]] = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", [call(0)]),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n", [call(0)]),
    ("hermes", f"<tool_call>\n{WEATHER}", [call(0)]),
    ("hermes", f"Let me see.\n\n<tool_call>\n{WEATHER}\n</tool_call>", ["Let me see.", call(0)]),
    (
        "hermes",
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NESTED}\n</tool_call>\nDone.",
        [call(0), call(1, IN_NESTED, "write"), "\nDone."],
    ),
    ("hermes", f"<tool_call>\n{WEATHER}}}\n</tool_call>", [call(0)]),
    ("hermes", f'<tool_call>{WEATHER[:-1]}, "id": {{"a": "}}"}}}}</tool_call> So.', [call(0), " So."]),
    ("hermes", f"<tool_call>{WEATHER[:-1]}</tool_call>", [call(0)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [call(0, '{"a": 1}', "f")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [call(0, "{}", "f")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [call(0, '{"a": "b', "f")]),
    ("llama3", LLAMA, [call(0)]),
    ("llama3", f"<|python_tag|>{LLAMA}", [call(0)]),
    ("llama3", f"\n{LLAMA}; {LLAMA}\n", [call(0), call(1)]),
    ("llama3", f"I see. <|python_tag|>{LLAMA}", ["I see.", call(0)]),
    ("mistral", f"[TOOL_CALLS][{WEATHER}]", [call(0)]),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {NESTED}]", [call(0), call(1, IN_NESTED, "write")]),
    ("mistral", f"Sure. [TOOL_CALLS][{WEATHER}", ["Sure.", call(0)]),
]
PLAIN: list[tuple[FormatName, str]] = [
    *[
        (name, text)
        for name in JSON_FORMATS
        for text in ("", "hello", " \n ", "a\n\n", "}", "<", "[", "; ", "{")
    ],
    ("hermes", WEATHER),
    ("hermes", "a <tool_call> is written so: <tool_call>..."),
    ("hermes", "<tool_call>get_weather(Bern)</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call> and more'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": 7}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": "7"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
    ("hermes", "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"arguments": {"a": }, "name": "f"}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "argum'),
    ("hermes", "  <tool_ca"),
    ("llama3", '{"name": "Rex", "age": 3} is my dog.'),
    ("llama3", f"He said: {LLAMA}"),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", f"[{WEATHER}]"),
    ("mistral", "[TOOL_CALLS] none ]"),
    ("mistral", '[TOOL_CALLS][{"age": 3}]'),
]


@pytest.mark.parametrize(("name", "text", "expected"), FOUND)
def test_calls_are_found(name: FormatName, text: str, expected: list[Piece]) -> None:
    assert read_json_calls(name, text) == expected
    assert read_json_calls(name, *text) == expected


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_is_content(name: FormatName, text: str) -> None:
    expected = [text] if text else []
    assert read_json_calls(name, text) == expected
    assert read_json_calls(name, *text) == expected


def test_a_bad_call_behind_a_good_one_is_content() -> None:
    bad = '<tool_call>\n{"name": "f"'
    assert read_json_calls("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>\n{bad}") == [call(0), f"\n{bad}"]
    assert read_json_calls("llama3", f'{LLAMA}; {{"name": 1}}') == [call(0), '; {"name": 1}']
    assert read_json_calls("mistral", f'[TOOL_CALLS][{WEATHER}, {{"na') == [call(0), ', {"na']


@settings(max_examples=400, deadline=None, print_blob=True)
@given(st.data())
def test_any_cut_tells_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(JSON_FORMATS)))
    text = data.draw(texts(name))
    places = data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=8))
    whole = read_json_calls(name, text)
    assert read_json_calls(name, *cut(text, places)) == whole
    assert read_json_calls(name, *text) == whole


names = st.integers(1, 600).map(lambda length: ("get.a-b_" * 75)[:length])
arguments = st.dictionaries(
    st.text(max_size=5), st.recursive(st.text() | st.integers(), st.lists, max_leaves=4)
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(JSON_FORMATS)), st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_calls_as_the_format_has_them_are_all_found(
    name: FormatName, calls: list[tuple[str, dict[str, object]]]
) -> None:
    form = JSON_FORMATS[name]
    objects = [json.dumps({"name": n, form.arguments: a}, ensure_ascii=False) for n, a in calls]
    text = form.prefix + form.between.join(objects) + form.suffix
    told = read_json_calls(name, text)
    assert [(piece.index, piece.name) for piece in told] == [(i, n) for i, (n, _) in enumerate(calls)]
    assert [json.loads(piece.arguments) for piece in told] == [a for _, a in calls]


def test_arguments_are_told_as_they_come() -> None:
    parser = JsonCallParser(JSON_FORMATS["hermes"])
    assert parser.push('Now. <tool_call>\n{"name": "f", "arguments": ') == ["Now."]
    assert parser.push('{"a') == [CallPiece(0, "f", ""), CallPiece(0, None, '{"a')]
    assert parser.push('": "x') == [CallPiece(0, None, '": "x')]
    assert parser.push('"}}\n</tool_call>') == [CallPiece(0, None, '"}')]
    assert parser.flush() == []


@pytest.mark.parametrize("scrap", ["<tool_call>", "{", '{"name": "f", "arguments": {', "<", " ", '"', "\\"])
def test_time_is_linear_in_the_answer(scrap: str) -> None:
    parser = JsonCallParser(JSON_FORMATS["hermes"])
    parser.push("<tool_call>{")
    started_s = time.process_time()
    for _ in range(20_000):
        parser.push(scrap)
    parser.flush()
    assert time.process_time() - started_s < 5.0
