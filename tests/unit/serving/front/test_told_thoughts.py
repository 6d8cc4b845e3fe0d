"""Every protocol shows the model's thoughts in its own way, and accepts them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt
from tests.unit.serving.local_service import MODEL, LocalService
from tests.unit.serving.replica_rig import running_rig
from tests.unit.serving.sdk_clients import anthropic_of, openai_of
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer
from tests.unit.serving.telling_service import CHAT, TOOL, WEATHER, TellingService
from tests.unit.serving.text.test_thoughts import OPENS

THOUGHT, SAID = "The dog, I know.", "Rex."
SWITCHED = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
WORDS = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
"""The words of a model that begins to think by itself."""


class Thinking(TellingService):
    model = replace(MODEL, reasoning="think")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL.model_id, "messages": [{"role": "user", "content": "Who?"}], **fields}


@pytest.mark.parametrize("pieces", [(WORDS,), tuple(WORDS)], ids=["whole", "characters"])
async def test_chats_tell_it_beside_the_content(pieces: tuple[str, ...]) -> None:
    service = Thinking(*pieces)
    async with openai_of(service) as client:
        whole = await client.chat.completions.create(**chat())
        message = whole.choices[0].message
        assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
        stream = await client.chat.completions.create(**chat(stream=True))
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert service.calls[0].shown_tokens == ("<think>", "</think>")


async def test_calls_are_found_behind_it() -> None:
    service = Thinking(f"<think>\nI call.\n</think>\n\n{WEATHER}")
    async with openai_of(service) as client:
        reply = await client.chat.completions.create(**chat(tools=[TOOL]))
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("I call.", None)
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]


async def test_an_answer_that_is_held_to_something_has_none() -> None:
    service = Thinking('{"a": 1}')
    async with openai_of(service) as client:
        reply = await client.chat.completions.create(**chat(response_format={"type": "json_object"}))
    assert json.loads(reply.choices[0].message.content) == {"a": 1}


async def test_messages_have_it_in_blocks() -> None:
    service = Thinking(*WORDS)
    asked: dict[str, Any] = chat(max_tokens=50)
    async with anthropic_of(service) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert (message.content[0].thinking, message.content[1].text) == (THOUGHT, SAID)


async def test_responses_have_it_as_items() -> None:
    service = Thinking(*WORDS)
    asked: dict[str, Any] = {
        "model": MODEL.model_id,
        "input": "Who?",
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    async with openai_of(service) as client:
        whole = await client.responses.create(**asked)
        stream = await client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert (whole.output[0].content[0].text, whole.output_text) == (THOUGHT, SAID)
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == THOUGHT
        # A client that keeps only the opaque text sends that back.
        kept = {"type": "reasoning", "summary": [], "encrypted_content": whole.output[0].encrypted_content}
        answer = {"role": "assistant", "content": SAID}
        await client.responses.create(**asked | {"input": [kept, answer, {"role": "user", "content": "So?"}]})
    prompt = service.calls[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0] == {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_chats_take_it_back(name: str) -> None:
    service = Thinking(SAID)
    told = {"role": "assistant", "content": SAID, name: THOUGHT}
    async with openai_of(service) as client:
        await client.post(CHAT.removeprefix("/v1"), body=chat(messages=[told]), cast_to=object)
    prompt = service.calls[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["reasoning_content"] == THOUGHT


async def test_a_thought_that_the_prompt_has_begun_is_one(tmp_path: Path) -> None:
    """The null model never ends the thought. With a session, the log shows it again."""
    text = TextProcessor(byte_level_tokenizer(OPENS), vocab_size=1000, max_context_len=512)

    class Serving(LocalService):
        model = replace(MODEL, reasoning="think")

    async with running_rig(tmp_path, text=text) as rig:
        service = Serving(rig)
        async with openai_of(service) as client:
            reply = await client.chat.completions.create(**chat(max_tokens=5, temperature=0))
            message = reply.choices[0].message
            assert message.reasoning_content
            assert message.content == ""
            stored = await client.responses.create(
                model=MODEL.model_id, input="Who?", max_output_tokens=5, temperature=0
            )
            again = await client.responses.retrieve(stored.id)
            assert [item.type for item in again.output] == ["reasoning"]
            assert again.output == stored.output


async def test_messages_think_only_if_they_are_asked_to(tmp_path: Path) -> None:
    """A template like Qwen3's. The numbers of tokens show whether it closed the thought."""
    text = TextProcessor(byte_level_tokenizer(SWITCHED), vocab_size=1000, max_context_len=512)
    async with running_rig(tmp_path, text=text) as rig:
        service = LocalService(rig)
        async with anthropic_of(service) as client:

            async def num_tokens(**fields: Any) -> int:
                usage = (await client.messages.create(**chat(max_tokens=1, **fields))).usage
                counted = await client.messages.count_tokens(**chat(**fields))
                assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
                return counted.input_tokens

            unasked = await num_tokens()
            assert unasked == await num_tokens(thinking={"type": "disabled"})
            assert unasked > await num_tokens(thinking={"type": "adaptive"})
