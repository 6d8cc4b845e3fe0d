"""A model's thoughts are separated from its answer, in every format and however the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.answer_parsers import thought_parser
from serving.text.answer_pieces import CallPiece, Thought
from serving.text.reasoning.formats import ReasoningName, reasoning_of
from serving.text.reasoning.harmony import HarmonyParser
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer
from tests.unit.serving.tool_texts import cut, read

SAID: list[tuple[ReasoningName, bool, str, str, str]] = [
    ("think", False, "<think>\nHm.\n</think>\n\nRex.", "Hm.", "Rex."),
    ("think", True, "Hm.\n</think>\n\nRex.", "Hm.", "Rex."),
    ("think", True, "<think>\nHm.\n</think>Rex.", "Hm.", "Rex."),
    ("think", True, "Cut off", "Cut off", ""),
    ("think", False, "<think>Cut off", "Cut off", ""),
    ("think", False, "Rex. <think>no</think>", "", "Rex. <think>no</think>"),
    ("think", False, "<think>\n\n</think>\n\nRex.", "", "Rex."),
    ("think", False, "<thin", "", "<thin"),
    ("magistral", False, "[THINK]a < b\n[/THINK]\nRex.", "a < b", "Rex."),
    (
        "gpt_oss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rex.",
        "Hm.",
        "Rex.",
    ),
    ("gpt_oss", False, "<|channel|>final<|message|>Rex.<|return|>", "", "Rex."),
    ("gpt_oss", False, "Rex.", "", "Rex."),
    ("gpt_oss", False, "<|return|>Rex.", "", "Rex."),
    ("gpt_oss", False, "<|start|>no header<|end|>Rex.", "", "no header\nRex."),
    ("think", False, "<think>\n\n\nHm.</think>Rex.", "Hm.", "Rex."),
    ("gpt_oss", False, "\u2028<|channel|>analysis<|message|>Hm.", "Hm.", "\u2028"),
    ("gpt_oss", False, "<|start|>words, and no end", "", "<|start|>words, and no end"),
    *[("gpt_oss", False, f"<|start|>{cut_off}", "", "") for cut_off in ("", "assis", "assistant<|chan")],
    ("gpt_oss", False, "<|channel|>commentary to=functions.f <|const", "", ""),
    ("gpt_oss", False, "<|channel|>commentary to=functions.f <|constrain|>json<|mess", "", ""),
]


@pytest.mark.parametrize(("name", "inside", "text", "thought", "content"), SAID)
def test_a_thought_is_told_apart(
    name: ReasoningName, inside: bool, text: str, thought: str, content: str
) -> None:
    for parts in ([text], list(text)):
        pieces = read(thought_parser(name, inside=inside), *parts)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == thought
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == content


SCRAPS = [
    *("<think>", "</think>", "<thi", "nk>", "[THINK]", "[/THINK]", "<|channel|>", "analysis", "final"),
    *("<|message|>", "<|end|>", "<|start|>", "assistant", "<|call|>", "<|return|>", "commentary"),
    *(" to=functions.f", " json", "\n", "\n\n", " ", "<", "words", "{}", "😀", "\u2028"),
]


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(["think", "magistral", "gpt_oss"]),
    inside=st.booleans(),
    text=st.lists(st.sampled_from(SCRAPS), max_size=12).map("".join),
    places=st.lists(st.integers(0, 80), max_size=12),
)
def test_what_is_told_depends_on_the_text_alone(
    name: ReasoningName, inside: bool, text: str, places: list[int]
) -> None:
    whole = read(thought_parser(name, inside=inside), text)
    assert read(thought_parser(name, inside=inside), *cut(text, places)) == whole


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from(SCRAPS), max_size=12).map("".join),
    places=st.lists(st.integers(0, 80), max_size=12),
)
def test_calls_in_channels_depend_on_the_text_alone(text: str, places: list[int]) -> None:
    whole = read(HarmonyParser(reads_calls=True), text)
    assert read(HarmonyParser(reads_calls=True), *cut(text, places)) == whole


def test_a_call_in_a_channel_is_told() -> None:
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert read(HarmonyParser(reads_calls=True), text) == [CallPiece(0, "f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}", "think"),
        ("{{ '[THINK]' }}", "magistral"),
        ("{{ '<|channel|>analysis' }}", "gpt_oss"),
        (CHATML, None),
    ],
)
def test_a_template_tells_its_format(template: str, name: ReasoningName | None) -> None:
    assert reasoning_of(template) == name


OPENS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
CLOSED = OPENS.replace("<think>\n", "<think>\n\n</think>\n\n")


@pytest.mark.parametrize(("template", "opens"), [(CHATML, False), (OPENS, True), (CLOSED, False)])
def test_a_prompt_that_opens_a_thought_is_known_by_its_tokens(template: str, opens: bool) -> None:
    text = TextProcessor(byte_level_tokenizer(template), vocab_size=1000, max_context_len=512)
    prompt = text.encode_prompt(ChatPrompt(({"role": "user", "content": "hi"},)))
    assert text.opens_thought(prompt) == opens
    assert text.reasoning_format("auto") == (None if template is CHATML else "think")
    assert text.reasoning_format("off") is None
