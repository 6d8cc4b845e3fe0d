"""A conversation is rendered from a question on only if the template writes that part as it would in the whole."""

from __future__ import annotations

from typing import Any

import pytest

from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt
from tests.unit.serving.small_tokenizer import byte_level_tokenizer
from tests.unit.serving.tool_templates import HERMES

NO_QUESTION = """{% set at = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<result>') %}
{%- set at.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > at.question %}{{ m.reasoning_content }}{% endif %}
{{- m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""
"""Like Qwen3's template: it writes the thoughts of answers after the last question. A user message that begins with the
mark of a tool result is no question."""

FIRST_RESULT = """{% set seen = namespace(result=false) %}{% for m in messages %}<|im_start|>{{ m.role + '\n' }}
{%- if m.role == 'tool' and not seen.result %}{% set seen.result = true %}results: {% endif %}
{{- m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"""
"""Like DeepSeek's template: it writes the first tool result of a conversation differently."""

CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "call00001"}


CALLED = [said("", tool_calls=[CALL]), result("7")]


@pytest.mark.parametrize(
    ("template", "asked", "rest"),
    [
        (
            NO_QUESTION,
            [user("one"), said("", reasoning_content="hm"), user("<result>7")],
            [said("seven"), user("two")],
        ),
        (FIRST_RESULT, [user("one"), *CALLED, said("seven"), user("two")], CALLED),
    ],
)
def test_what_depends_on_what_was_said_before_is_rendered_whole(
    template: str, asked: list[dict[str, Any]], rest: list[dict[str, Any]]
) -> None:
    text = TextProcessor(byte_level_tokenizer(template), vocab_size=1000, max_context_len=512)
    known = text.encode_prompt(ChatPrompt(tuple(asked)))
    prompt = ChatPrompt((*asked, *rest))
    behind = text.encode_answered(prompt, known, num_asked=len(asked), asked_len=len(known))
    continued = behind or text.encode_conversation(prompt, known)
    assert [*known[: continued.kept_len], *continued.new_tokens] == text.encode_prompt(prompt)


def test_calls_alone_are_no_cause_to_render_it_whole() -> None:
    text = TextProcessor(byte_level_tokenizer(HERMES), vocab_size=1000, max_context_len=512)
    asked = [user("one"), *CALLED, said("seven"), user("two")]
    known = text.encode_prompt(ChatPrompt(tuple(asked)))
    prompt = ChatPrompt((*asked, *CALLED))
    whole = text.encode_prompt(prompt)
    continued = text.encode_answered(prompt, known, num_asked=len(asked), asked_len=len(known))
    assert continued is not None
    assert [*known[: continued.kept_len], *continued.new_tokens] == whole
