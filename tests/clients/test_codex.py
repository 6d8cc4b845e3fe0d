"""Codex (`codex exec`) does a task with Kedge over the Responses API: it runs a command and answers two questions."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.clients.held_answers import Call, HeldAnswers, Words
from tests.clients.held_responses import HeldResponses
from tests.clients.npm_tools import installed
from tests.cluster.served_cluster import ServedCluster
from tests.unit.serving.local_service import http_server

CACHED_SHARE = 0.95
RUN_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def codex(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None
    return installed("codex", cache.mkdir("clients-npm"))


async def run(codex: Path, url: str, directory: Path, *arguments: str) -> str:
    """Runs `codex exec` and returns its last message. It sees none of the settings of whoever runs the tests."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    last = directory / "last.txt"
    provider = f'model_providers.kedge={{name="Kedge",base_url="{url}/v1",wire_api="responses"}}'
    settings = ['model_provider="kedge"', provider, 'model="gpt-5-codex"', 'web_search="disabled"']
    process = await asyncio.create_subprocess_exec(
        str(codex),
        "exec",
        *(word for setting in settings for word in ("-c", setting)),
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "--output-last-message",
        str(last),
        *arguments,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
    assert process.returncode == 0, out.decode()
    return last.read_text()


@pytest.mark.timeout(500)
async def test_codex_works_at_a_task(codex: Path, kedge: ServedCluster, tmp_path: Path) -> None:
    """`resume` starts another process, which sends the whole history again."""
    (tmp_path / "notes.txt").write_text("The word is anchor.\n")
    held = HeldAnswers(
        kedge.url,
        HeldResponses(),
        [
            Call("exec_command", {"cmd": "cat notes.txt; echo anchor > answer.txt"}),
            Words("The word is written down."),
            Words("It is anchor."),
        ],
    )
    async with http_server(held.app) as url:
        first = await run(codex, url, tmp_path, "Write the word of notes.txt into answer.txt.")
        second = await run(codex, url, tmp_path, "resume", "--last", "Which word is it?")
    assert held.statuses == [200] * 3
    assert (json.loads(first), json.loads(second)) == ("The word is written down.", "It is anchor.")
    assert (tmp_path / "answer.txt").read_text() == "anchor\n"
    assert "The word is anchor." in json.dumps(held.exchanges[1].body["input"])
    shares = held.cached_shares()
    assert min(shares) >= CACHED_SHARE, shares
