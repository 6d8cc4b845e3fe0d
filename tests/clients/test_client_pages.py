"""The programs on the pages in docs/clients run as they are written. Only the server's address differs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.held_answers import Call, HeldAnswers, HeldApi, Words
from tests.clients.held_chats import HeldChats
from tests.clients.held_messages import HeldMessages
from tests.clients.held_responses import HeldResponses
from tests.clients.python_tools import interpreter, run_program
from tests.cluster.served_cluster import ROOT, ServedCluster
from tests.unit.serving.local_service import http_server

PAGES = ROOT / "docs" / "clients"
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
WRITTEN_URL = "http://127.0.0.1:8000"
TALK = (Words("Rex, then."), Words("4, 5, 6."), Words("It is Rex."))
WITH_A_TOOL = (Call("find_dog", {"name": "Rex"}), Words("Rex is in the park."), Words("It is Rex."))
RUNS: list[tuple[str, int, str, HeldApi, tuple[Call | Words, ...]]] = [
    ("openai", 0, "agents", HeldChats(), TALK),
    ("openai", 1, "agents", HeldResponses(), TALK),
    ("openai-agents", 0, "agents", HeldResponses(), WITH_A_TOOL),
    ("anthropic", 0, "agents", HeldMessages(), TALK),
    ("anthropic", 1, "agents", HeldMessages(), WITH_A_TOOL[:2]),
    ("langchain", 0, "agents", HeldChats(), WITH_A_TOOL),
    ("llama-index", 0, "llama_index", HeldChats(), WITH_A_TOOL),
]
"""Page, index of the program on it, environment that runs it, API that it uses, and the answers that it gets."""


def programs(page: str) -> list[str]:
    return PROGRAM.findall((PAGES / f"{page}.md").read_text())


def test_every_program_is_run() -> None:
    there = {(path.stem, at) for path in PAGES.glob("*.md") for at in range(len(programs(path.stem)))}
    assert {run[:2] for run in RUNS} == there


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("page", "at", "environment", "api", "answers"), RUNS, ids=[f"{run[0]}-{run[1]}" for run in RUNS]
)
async def test_a_program_of_a_page(
    pytestconfig: pytest.Config,
    kedge: ServedCluster,
    tmp_path: Path,
    page: str,
    at: int,
    environment: str,
    api: HeldApi,
    answers: tuple[Call | Words, ...],
) -> None:
    cache = pytestconfig.cache
    assert cache is not None
    python = interpreter(environment, cache.mkdir(f"clients-{environment}"))
    held = HeldAnswers(kedge.url, api, answers)
    program = tmp_path / "program.py"
    async with http_server(held.app) as url:
        program.write_text(programs(page)[at].replace(WRITTEN_URL, url))
        printed = await run_program(python, program, home=tmp_path)
    assert held.statuses == [200] * len(answers)
    said = [json.dumps(answer.text) for answer in answers if isinstance(answer, Words)]
    assert [line for line in printed.splitlines() if line in said] == said, printed
