"""Clients know from an error's words that the context is full. They then shorten the conversation and go on."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import MODEL

OPENCODE = re.compile(r"maximum context length is \d+ tokens", re.IGNORECASE)
CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
LITELLM = "this model's maximum context length is"
ANTHROPIC = "prompt is too long"


def bodies(text: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/generate": {"text": text},
    }


@pytest.mark.parametrize("path", list(bodies("")))
async def test_a_full_context_is_told_in_the_words_that_clients_look_for(
    client: httpx.AsyncClient, path: str
) -> None:
    for num_chars, tells_tokens in ((MODEL.max_context_len, True), (1_000_000, False)):
        reply = await client.post(path, json=bodies("a" * num_chars)[path])
        said: str = reply.json()["error"]["message"]
        assert reply.status_code == 400
        assert OPENCODE.search(said), said
        assert LITELLM in said.lower(), said
        assert ANTHROPIC in said, said
        found = CLAUDE_CODE.search(said)
        assert (found is not None) == tells_tokens, said
        assert found is None or int(found[1]) > int(found[2]) == MODEL.max_context_len - 1
