"""Stream chunks that are written from templates have the same bytes as chunks that are written as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import TokenLogprob
from serving.front.api import reply_json
from serving.front.api.answers.tools import NO_TOOLS
from serving.front.api.openai.chat import ChatEncoder
from serving.front.api.openai.chat_answers import ChatReader
from serving.front.api.openai.chat_schema import ChatBody
from serving.front.api.openai.completions import CompletionEncoder
from serving.front.api.openai.completions_schema import CompletionBody
from serving.front.api.sse import StreamEncoder
from serving.wire.turns import TextLogprob, TextPrompt, TurnEvent, TurnFinish

TEXTS = ["plain", '"quoted"', "a\nb\\", "\u2028 \x00 \U0001f600", reply_json.TextTemplate.TEXT, "text"]
MODEL = f'of "{reply_json.TextTemplate.TEXT}"'
"""A model name that contains the placeholder of a template's text."""
LOGPROBS = (TextLogprob(TokenLogprob(7, -1.0), b"x"),)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
]


def chat(fields: dict[str, Any]) -> StreamEncoder:
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    )
    return ChatEncoder(body, [ChatReader("r", NO_TOOLS, None) for _ in range(2)], "id", MODEL)


def completion(fields: dict[str, Any]) -> StreamEncoder:
    body = CompletionBody.model_validate({"prompt": "hi", "stream": True, **fields})
    return CompletionEncoder(body, [TextPrompt("hi")], "id", MODEL)


def events() -> list[TurnEvent]:
    told = [
        TurnEvent(text, (index,), 3, 1, index + 1, turn_index=2, draft_tokens=2)
        for index, text in enumerate(TEXTS)
    ]
    return [*told, TurnEvent("end", (9,), 3, 1, len(TEXTS) + 1, finish=TurnFinish("stop", "a"))]


async def written(encoder: StreamEncoder, each: list[TurnEvent]) -> list[bytes]:
    chunks = [await encoder.chunk(index, event) for event in each for index in (0, 1)]
    return [*chunks, encoder.closing()]


@pytest.mark.parametrize("fields", VARIANTS)
@pytest.mark.parametrize("make", [chat, completion])
async def test_they_are_those_that_are_written_as_a_whole(
    make: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 17.0)
    fast, slow = make(fields), make(fields)
    slow._differs = True
    assert await written(fast, events()) == await written(slow, events())


@pytest.mark.parametrize("make", [chat, completion])
async def test_an_event_without_text_has_no_chunk(make: Any) -> None:
    chunks = await written(make({}), [TurnEvent(text, (7,)) for text in ("a", "", "b")])
    assert [bool(chunk) for chunk in chunks[:-1]] == [True, True, False, False, True, True]


@pytest.mark.parametrize("make", [chat, completion])
async def test_log_probabilities_are_in_every_chunk_that_has_some(make: Any) -> None:
    encoder = make({"logprobs": True if make is chat else 1})
    chunks = await written(encoder, [TurnEvent("x", (7,), logprobs=LOGPROBS)] * 3)
    assert all(b"-1.0" in chunk for chunk in chunks[:-1])
