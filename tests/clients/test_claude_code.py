"""Claude Code (`claude -p`) does a task with Kedge: it reads a file, writes another and answers two questions."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.clients.held_answers import Call, HeldAnswers, Words
from tests.clients.held_messages import HeldMessages
from tests.clients.npm_tools import installed
from tests.cluster.served_cluster import ServedCluster
from tests.unit.serving.local_service import http_server

CACHED_SHARE = 0.95
RUN_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def claude(pytestconfig: pytest.Config) -> Path:
    cache = pytestconfig.cache
    assert cache is not None
    return installed("claude", cache.mkdir("clients-npm"))


async def run(claude: Path, url: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """Runs `claude -p` and returns its JSON. It sees none of the settings of whoever runs the tests."""
    (directory / "home").mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory / "home"),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "claude-haiku-4-5",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    process = await asyncio.create_subprocess_exec(
        str(claude),
        "-p",
        *arguments,
        "--model",
        "claude-sonnet-4-5",
        "--allowedTools=Read,Write",
        "--output-format=json",
        cwd=directory,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
    assert process.returncode == 0, (out, err)
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.timeout(500)
async def test_claude_code_works_at_a_task(claude: Path, kedge: ServedCluster, tmp_path: Path) -> None:
    """`--continue` starts another process, which sends the whole history again."""
    notes, answer = tmp_path / "notes.txt", tmp_path / "answer.txt"
    notes.write_text("The word is anchor.\n")
    held = HeldAnswers(
        kedge.url,
        HeldMessages(),
        [
            Call("Read", {"file_path": str(notes)}),
            Call("Write", {"file_path": str(answer), "content": "anchor"}),
            Words("The word is written down."),
            Words("It is anchor."),
        ],
    )
    async with http_server(held.app) as url:
        first = await run(claude, url, tmp_path, "Write the word of notes.txt into answer.txt.")
        second = await run(claude, url, tmp_path, "Which word is it?", "--continue")
    assert held.statuses == [200] * 4
    assert (first["is_error"], json.loads(first["result"])) == (False, "The word is written down.")
    assert (second["is_error"], json.loads(second["result"])) == (False, "It is anchor.")
    assert answer.read_text() == "anchor"
    assert "The word is anchor." in json.dumps(held.exchanges[1].body["messages"])
    shares = held.cached_shares()
    assert min(shares) >= CACHED_SHARE, shares
