"""Whether a history begins with some messages: as if all of them became tokens, at the cost of the last of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.text import TextProcessor, common_len
from serving.wire.turns import ChatPrompt
from tests.unit.serving.small_tokenizer import byte_level_tokenizer, piece_tokenizer

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IN_PIECES = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Looks it up. " * 100}},)


def pieces_text() -> TextProcessor:
    tokenizer = piece_tokenizer()
    tokenizer.chat_template = IN_PIECES
    return TextProcessor(tokenizer, vocab_size=700, max_context_len=4000)


TEXTS = {
    "bytes": TextProcessor(byte_level_tokenizer(WITH_TOOLS), vocab_size=700, max_context_len=4000),
    "pieces": pieces_text(),
}

contents = st.lists(
    st.sampled_from(["dog", " ", "a", "\n", "park ", ".", "é", "<|im_end|>", "</s>"]), max_size=3
).map("".join)
conversations = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=4
).map(lambda said: tuple({"role": role, "content": content} for role, content in said))
prompts = st.builds(ChatPrompt, conversations, tools=st.sampled_from([(), TOOLS]))


def begins_slowly(text: TextProcessor, history: list[int], prompt: ChatPrompt) -> bool:
    whole = text.encode_prompt(prompt)
    return common_len(history[: len(whole)], whole) == len(whole)


@pytest.mark.parametrize("kind", TEXTS)
@settings(deadline=None)
@given(st.data(), prompts, st.booleans())
def test_it_is_known_without_the_tools_tokens(kind: str, data: Any, first: ChatPrompt, alike: bool) -> None:
    text = TEXTS[kind]
    prompt = first if alike else data.draw(prompts)
    history = text.encode_prompt(first)
    history += data.draw(st.lists(st.sampled_from(history), max_size=9))
    history = history[: len(history) - data.draw(st.sampled_from([0, 0, 1, 20]))]
    assert text.begins(history, prompt) == begins_slowly(text, history, prompt)


def test_tools_that_come_again_do_not_become_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXTS["bytes"]
    history = text.encode_prompt(ChatPrompt(({"role": "user", "content": "Where is Rex?"},), tools=TOOLS))
    encoded: list[str] = []
    encode = text._encode
    monkeypatch.setattr(
        text,
        "_encode",
        lambda words, *args, **options: encoded.append(words) or encode(words, *args, **options),
    )
    again = ChatPrompt(({"role": "user", "content": "And now?"},), tools=TOOLS)
    assert not text.begins(history, again)
    assert encoded == ["<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"]
