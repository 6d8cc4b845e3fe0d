"""What a shell is offered to complete: the ids of the server that the command line names, within a second."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from typer.testing import CliRunner

from serving.cli.commands.completion import PATIENCE_S
from serving.cli.main import app
from tests.unit.serving.replica_rig import REPLICA_ID
from tests.unit.serving.served_service import ServedService, served_service


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedService]:
    with served_service(tmp_path_factory.mktemp("served")) as served:
        for session_id, tenant in (("anna-1", ""), ("anna-2", ""), ("bob", ""), ("anna-3", "acme")):
            headers = {"x-tenant-id": tenant} if tenant else {}
            body = {"session_id": session_id}
            httpx.post(f"{served.address}/v1/kedge/sessions", json=body, headers=headers).raise_for_status()
        yield served


def offered(words: str, **env: str) -> list[str]:
    """What bash is offered. `words` ends with the word that is being typed, which may be empty."""
    count = len(words.split(" ")) - 1
    asked = {"_KEDGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    result = CliRunner().invoke(app, [], prog_name="kedge", env=asked | env)
    assert result.stderr == "", result.stderr
    return result.stdout.split()


def test_commands_are_offered() -> None:
    assert {"serve", "chat", "sessions", "info", "top", "audit", "drain", "bench"} <= set(offered("kedge "))
    assert offered("kedge sessions m") == ["move"]


@pytest.mark.parametrize("command", ["show", "close", "fork", "rewind", "move"])
def test_sessions_are_offered(served: ServedService, command: str) -> None:
    assert offered(f"kedge sessions {command} b", KEDGE_URL=served.address) == ["bob"]


def test_the_line_says_which_server_and_tenant(served: ServedService) -> None:
    nobody = "http://127.0.0.1:9"
    for line in (
        f"kedge sessions --url {served.address} --tenant acme show anna",
        f"kedge sessions show --url {served.address} --tenant acme anna",
    ):
        assert offered(line, KEDGE_URL=nobody) == ["anna-3"]


def test_what_was_named_is_not_offered_again(served: ServedService) -> None:
    assert offered("kedge sessions close anna-1 anna", KEDGE_URL=served.address) == ["anna-2", "anna-3"]


@pytest.mark.parametrize("line", ["kedge drain rep", "kedge sessions move bob --to rep"])
def test_replicas_are_offered(served: ServedService, line: str) -> None:
    assert offered(line, KEDGE_URL=served.address) == [REPLICA_ID]


@pytest.mark.parametrize("line", ["kedge sessions show ", "kedge drain "])
def test_who_does_not_answer_offers_nothing_in_time(line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        assert offered(line, KEDGE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}") == []
        assert time.monotonic() - began_s < PATIENCE_S + 5.0
    assert offered(line, KEDGE_URL="http://127.0.0.1:9") == []
    assert offered(line, KEDGE_URL="nonsense") == []
