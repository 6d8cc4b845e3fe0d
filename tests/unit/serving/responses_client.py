"""OpenAI's own client, at the real turns of one replica over real HTTP, and what Responses there must say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from serving.front.api.responses.history import template_messages
from serving.front.http import create_http_app
from serving.wire.turns import ChatPrompt
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import (
    MODEL,
    LocalService,
    http_server,
    local_service,
    shown_text,
    small_text,
)
from tests.unit.serving.replica_rig import VOCAB_SIZE
from tests.unit.serving.sdk_clients import openai_at

MOST = 5
GREEDY: dict[str, Any] = {"model": MODEL.model_id, "temperature": 0, "max_output_tokens": MOST}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@dataclass
class Served:
    client: openai.AsyncOpenAI
    service: LocalService

    async def ask(self, text: str, **fields: Any) -> Any:
        return await self.client.responses.create(input=text, **GREEDY, **fields)


@asynccontextmanager
async def served_responses(directory: Path) -> AsyncIterator[Served]:
    async with (
        local_service(directory) as service,
        http_server(create_http_app(service)) as url,
        openai_at(url) as client,
    ):
        yield Served(client, service)


def expected(items: Sequence[dict[str, Any]], instructions: str | None = None) -> str:
    """The answer to a fresh request with the whole conversation."""
    prompt = small_text().encode_prompt(ChatPrompt(template_messages(instructions, items)))
    return shown_text(null_generate(prompt, MOST, VOCAB_SIZE))


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(response: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": response.output_text}],
    }
