"""Real Python clients, each in a process of its own, do a task with a tool call and a second question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.held_answers import Call, HeldAnswers, HeldApi, Words
from tests.clients.held_chats import HeldChats
from tests.clients.held_messages import HeldMessages
from tests.clients.held_responses import HeldResponses
from tests.clients.python_tools import LOCKED, interpreter, run_program
from tests.cluster.served_cluster import ServedCluster
from tests.unit.serving.local_service import http_server

CACHED_SHARE = 0.95
ANSWERS = (
    Call("find_berth", {"ship": "Anna"}),
    Words("The Anna is at berth 7."),
    Words("It was the Anna."),
)


@dataclass(frozen=True, slots=True)
class Client:
    """A program with its mode (`program.py MODE`), the environment that it runs in, and the API that it uses."""

    environment: str
    program: str
    mode: str
    api: HeldApi


CLIENTS = [
    Client("agents", "openai_chat", "whole", HeldChats()),
    Client("agents", "openai_chat", "stream", HeldChats()),
    Client("agents", "openai_responses", "whole", HeldResponses()),
    Client("agents", "openai_responses", "named", HeldResponses()),
    Client("agents", "openai_responses", "session", HeldResponses()),
    Client("agents", "agents_sdk", "responses", HeldResponses()),
    Client("agents", "agents_sdk", "chat", HeldChats()),
    Client("agents", "anthropic_messages", "whole", HeldMessages()),
    Client("agents", "anthropic_messages", "stream", HeldMessages()),
    Client("agents", "langchain_agent", "chat", HeldChats()),
    Client("agents", "langchain_agent", "responses", HeldResponses()),
    Client("llama_index", "llama_index_agent", "whole", HeldChats()),
    Client("llama_index", "llama_index_agent", "stream", HeldChats()),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.program}-{client.mode}")
async def test_a_client_works_at_a_task(
    pytestconfig: pytest.Config, kedge: ServedCluster, tmp_path: Path, client: Client
) -> None:
    """The client finds a ship and says where it is. Then it is asked which ship that was."""
    cache = pytestconfig.cache
    assert cache is not None
    python = interpreter(client.environment, cache.mkdir(f"clients-{client.environment}"))
    held = HeldAnswers(kedge.url, client.api, ANSWERS)
    async with http_server(held.app) as url:
        printed = await run_program(python, LOCKED / f"{client.program}.py", url, client.mode, home=tmp_path)
    seen = json.loads(printed)
    assert held.statuses == [200] * len(ANSWERS)
    assert [json.loads(answer) for answer in seen["answers"]] == [
        answer.text for answer in ANSWERS if isinstance(answer, Words)
    ]
    assert seen["asked_for"] == ["Anna"]
    assert seen["cached_tokens"] == [each.cached_tokens for each in held.usages()]
    shares = held.cached_shares()
    assert min(shares) >= CACHED_SHARE, shares
