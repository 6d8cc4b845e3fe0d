"""Calls that are a name and a JSON object are found in every format that has them, however the answer was cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.answer_pieces import CallPiece, Piece
from serving.text.tool_calls.formats import NAMED_FORMATS, FormatName
from serving.text.tool_calls.named_parser import NamedCallParser
from tests.unit.serving.tool_texts import cut, read

ID = "aB3dEfgh9"
BERN = '{"city": "Bern"}'
V31 = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def told(name: FormatName, *parts: str) -> list[Piece]:
    return read(NamedCallParser(NAMED_FORMATS[name]), *parts)


def call(index: int, name: str = "f", arguments: str = "{}", call_id: str | None = None) -> CallPiece:
    return CallPiece(index, name, arguments, call_id)


FOUND: list[tuple[FormatName, str, list[Piece]]] = [
    ("mistral_v11", f"[TOOL_CALLS]look[ARGS]{BERN}", [call(0, "look", BERN)]),
    ("mistral_v11", "Sure. [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{} ", ["Sure.", call(0), call(1, "g")]),
    ("mistral_v11", "[TOOL_CALLS]f[ARGS]{} So.", [call(0), " So."]),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]}', [call(0, arguments='{"a": "[TOOL_CALLS]}')]),
    ("mistral_call_id", f"[TOOL_CALLS]look[CALL_ID]aB3dEfgh9[ARGS]{BERN}", [call(0, "look", BERN, ID)]),
    (
        "mistral_call_id",
        f"Sure. [TOOL_CALLS]f[CALL_ID]{ID}[ARGS]{{}}[TOOL_CALLS]g[CALL_ID]000000000[ARGS]{{}}\n",
        ["Sure.", call(0, call_id=ID), call(1, "g", call_id="000000000")],
    ),
    (
        "mistral_call_id",
        f"[TOOL_CALLS]f[CALL_ID]{ID}[ARGS]{{}}[TOOL_CALLS]f[CALL_ID]{ID}[ARGS]{{}}",
        [call(0, call_id=ID), call(1)],  # two calls never have the same id
    ),
    ("mistral_call_id", "[TOOL_CALLS]f[CALL_ID]call_1[ARGS]{}", [call(0)]),  # no template accepts that id
    ("mistral_call_id", "[TOOL_CALLS]f[ARGS]{}", [call(0)]),
    ("deepseek_v31", f"I look.{BEGIN}{V31}{V31}{END}", ["I look.", call(0), call(1)]),
    ("deepseek_v31", f"{BEGIN}{V31}", [call(0)]),
    ("deepseek_v31", V31.removesuffix("<｜tool▁call▁end｜>"), [call(0)]),
    ("deepseek_v31", f"{BEGIN}{V31}{END}\nDone.", [call(0), "\nDone."]),
    (
        "deepseek_v3",
        f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{}}\n```<｜tool▁call▁end｜>{END}",
        [call(0)],
    ),
]
PLAIN: list[tuple[FormatName, str]] = [
    *[(name, text) for name in NAMED_FORMATS for text in ("", "hello", " \n ", "a\n\n", "}", "<", "[", "{")],
    ("mistral_v11", "f[ARGS]{}"),
    ("mistral_v11", "[TOOL_CALLS]two words[ARGS]{}"),
    ("mistral_v11", "[TOOL_CALLS]f[ARGS]none"),
    ("mistral_v11", "[TOOL_CALLS][ARGS]{}"),
    ("mistral_v11", f"[TOOL_CALLS]{'f' * 600}[ARGS]{{}}"),
    ("mistral_v11", f"[TOOL_CALLS]f[CALL_ID]{ID}[ARGS]{{}}"),
    ("mistral_call_id", "[TOOL_CALLS]f[CALL_ID][ARGS]{}"),
    ("mistral_call_id", f"[TOOL_CALLS][CALL_ID]{ID}[ARGS]{{}}"),
    ("mistral_call_id", f"[TOOL_CALLS]f[CALL_ID]{ID}{{}}"),
    ("mistral_call_id", f"[TOOL_CALLS]f[CALL_ID]two ids{ID}[ARGS]{{}}"),
    ("mistral_call_id", f"[TOOL_CALLS]f[CALL_ID]{'i' * 600}[ARGS]{{}}"),
    ("deepseek_v31", f"{BEGIN}{END}"),
    ("deepseek_v31", f"{BEGIN} and words"),
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


SCRAPS = [
    *("[CALL_ID]", "[CALL", "_ID]", ID, "[CALL_ID]aB3dEfgh9[ARGS]"),
    *("[TOOL_CALLS]", "[ARGS]", "[TOOL", "_CALLS]", "f", "name", " ", "\n", "{", "}", "{}", BERN, "words"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", END),
    *("function<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool", "```", '"', "\\"),
]


@settings(max_examples=600, deadline=None, print_blob=True)
@given(
    name=st.sampled_from(sorted(NAMED_FORMATS)),
    text=st.lists(st.sampled_from(SCRAPS), max_size=14).map("".join),
    places=st.lists(st.integers(0, 120), max_size=12),
)
def test_any_cut_tells_the_same(name: FormatName, text: str, places: list[int]) -> None:
    whole = told(name, text)
    assert told(name, *cut(text, places)) == whole
    assert told(name, *text) == whole


names = st.integers(1, 480).map(lambda length: ("get.a-b_" * 75)[:length])
arguments = st.dictionaries(
    st.text(max_size=5), st.recursive(st.text() | st.integers(), st.lists, max_leaves=4)
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(NAMED_FORMATS)), st.lists(st.tuples(names, arguments), min_size=1, max_size=3))
def test_calls_as_the_format_has_them_are_all_found(
    name: FormatName, calls: list[tuple[str, dict[str, object]]]
) -> None:
    form = NAMED_FORMATS[name]
    written = [f"{form.head(n)}{json.dumps(a, ensure_ascii=False)}{form.tail}" for n, a in calls]
    pieces = told(name, form.prefix + form.between.join(written) + form.suffix)
    assert all(isinstance(piece, CallPiece) for piece in pieces)
    found = [piece for piece in pieces if isinstance(piece, CallPiece)]
    assert [(piece.index, piece.name) for piece in found] == [(i, n) for i, (n, _) in enumerate(calls)]
    assert [json.loads(piece.arguments) for piece in found] == [a for _, a in calls]
