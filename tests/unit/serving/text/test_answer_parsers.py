"""Thoughts, calls and content of one answer, in formats that have both thoughts and calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.answer_parsers import answer_parser
from serving.text.answer_pieces import CallPiece, Piece, Thought
from serving.text.reasoning.formats import HARMONY_TOKENS, ReasoningName
from serving.text.tool_calls.formats import FormatName
from tests.unit.serving.held_outputs import any_output, grammars_of, held_to_calls
from tests.unit.serving.small_tokenizer import byte_level_tokenizer
from tests.unit.serving.tool_texts import cut, read

HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
HERMES_CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CALL = CallPiece(0, "f", '{"a": 1}')
SAID: list[tuple[FormatName | None, ReasoningName | None, str, list[Piece]]] = [
    (
        "gpt_oss",
        "gpt_oss",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}",
        [Thought("Hm."), CALL],
    ),
    ("gpt_oss", None, HARMONY_CALL, [CALL]),
    ("gpt_oss", None, "<|channel|>final<|message|>Rex.", ["Rex."]),
    (None, "gpt_oss", f"{HARMONY_CALL}<|call|>", [f"{HARMONY_CALL}<|call|>"]),
    ("hermes", "think", f"<think>Hm.</think>{HERMES_CALL}", [Thought("Hm."), CALL]),
    ("hermes", "think", f"<think>{HERMES_CALL}</think>Rex.", [Thought(HERMES_CALL), "Rex."]),
    ("hermes", None, HERMES_CALL, [CALL]),
    (None, "think", f"<think>Hm.</think>{HERMES_CALL}", [Thought("Hm."), HERMES_CALL]),
    ("hermes", "think", "<think>Hm.</think>Rex. <tool_c", [Thought("Hm."), "Rex. <tool_c"]),
]


@pytest.mark.parametrize(("calls", "thoughts", "text", "expected"), SAID)
def test_each_part_is_told_as_what_it_is(
    calls: FormatName | None, thoughts: ReasoningName | None, text: str, expected: list[Piece]
) -> None:
    for parts in ([text], list(text)):
        assert read(answer_parser(calls, {}, thoughts, inside=False), *parts) == expected


SCRAPS = [
    *(
        "<think>",
        "</think>",
        "<thi",
        "<tool_call>",
        "</tool_call>",
        HERMES_CALL,
        HARMONY_CALL,
        "<|call|>",
        "<|end|>",
    ),
    *("<|start|>assistant", "<|channel|>analysis<|message|>", "words", "\n", " ", "{", "<"),
]


@settings(max_examples=300, deadline=None)
@given(
    formats=st.sampled_from([("gpt_oss", "gpt_oss"), ("hermes", "think"), ("qwen3_coder", "think")]),
    text=st.lists(st.sampled_from(SCRAPS), max_size=10).map("".join),
    places=st.lists(st.integers(0, 160), max_size=12),
)
def test_any_cut_tells_the_same(
    formats: tuple[FormatName, ReasoningName], text: str, places: list[int]
) -> None:
    calls, thoughts = formats
    whole = read(answer_parser(calls, {}, thoughts, inside=False), text)
    assert read(answer_parser(calls, {}, thoughts, inside=False), *cut(text, places)) == whole


@pytest.mark.parametrize("parallel", [False, True])
def test_an_answer_in_channels_that_is_held_to_a_call_has_one(parallel: bool) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY_TOKENS)})
    parameters = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    functions: dict[str, object] = {"f": {**parameters, "additionalProperties": False}}
    grammars = grammars_of(tokenizer)
    for seed in range(6):
        out = any_output(held_to_calls(grammars, "gpt_oss", functions, parallel=parallel), seed)
        text = tokenizer.decode(out, skip_special_tokens=False)
        (call,) = read(answer_parser("gpt_oss", {}, None, inside=False), text)
        assert isinstance(call, CallPiece)
        assert call.name == "f"
        assert isinstance(json.loads(call.arguments)["n"], bool)
