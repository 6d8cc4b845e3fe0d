"""`kedge sessions show|close|fork|rewind|move`, against the real service over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from serving.cli.commands.session_history import said, turns_of
from serving.cli.main import app
from tests.unit.serving.replica_rig import REPLICA_ID
from tests.unit.serving.served_service import ServedService, served_service

LONG = "hello " * 40


@contextmanager
def with_two_turns(directory: Path) -> Iterator[ServedService]:
    """A service whose session "a/b" has two turns. The first is long."""
    with served_service(directory) as served:
        for content in (LONG, "and\nnow?"):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
            reply = httpx.post(
                f"{served.address}/v1/chat/completions", json=body, headers={"x-session-id": "a/b"}
            )
            assert reply.status_code == 200, reply.text
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedService]:
    """For a test that changes the session."""
    with with_two_turns(tmp_path) as served:
        yield served


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedService]:
    """For all tests that leave the session as it is."""
    with with_two_turns(tmp_path_factory.mktemp("shared")) as served:
        yield served


def kedge(served: ServedService, *arguments: str, columns: int = 80) -> Result:
    env = {"COLUMNS": str(columns), "KEDGE_URL": served.address, "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["sessions", *arguments], env=env)


def told(served: ServedService, *arguments: str) -> Any:
    result = kedge(served, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def read(served: ServedService, session_id: str = "a%2Fb") -> dict[str, Any]:
    reply = httpx.get(f"{served.address}/v1/kedge/sessions/{session_id}?messages=true")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_show_tells_each_turn_and_its_checkpoint(shared: ServedService) -> None:
    result = kedge(shared, "show", "a/b")
    assert result.exit_code == 0, result.output
    first, second = read(shared)["checkpoints"]
    lines = result.output.splitlines()
    assert f"owner    {REPLICA_ID}, epoch 1" in lines
    rows = [line for line in lines if " user " in line or " assistant " in line]
    assert len(rows) == 4
    assert rows[0].split()[:3] == ["0", "user", "hello"]
    assert "…" in rows[0]
    assert rows[1].split()[-2:] == [f"+{first['tokens']}", f"{first['tokens']}"]
    assert rows[2].split() == ["1", "user", "and", "now?"]
    assert rows[3].split()[-1] == f"{second['tokens']}"
    assert all(len(line) <= 80 for line in lines)


def test_show_in_full_shortens_nothing(shared: ServedService) -> None:
    output = kedge(shared, "show", "a/b", "--full").output
    assert output.count("hello") == LONG.count("hello")
    assert "…" not in output


def test_show_for_programs_is_what_the_server_says(shared: ServedService) -> None:
    shown, expected = told(shared, "show", "a/b"), read(shared)
    for figures in (shown, expected):
        del figures["idle_s"], figures["size_bytes"]
    assert shown == expected


def test_show_of_a_session_without_turns(shared: ServedService) -> None:
    httpx.post(f"{shared.address}/v1/kedge/sessions", json={"session_id": "new"})
    assert "nothing was said in it yet" in kedge(shared, "show", "new").output


@pytest.mark.parametrize(
    "arguments", [("show",), ("close",), ("fork",), ("rewind", "--turn", "0"), ("move", "--to", REPLICA_ID)]
)
def test_an_unknown_session_is_told_in_one_line(shared: ServedService, arguments: tuple[str, ...]) -> None:
    result = kedge(shared, arguments[0], "unknown", *arguments[1:])
    assert result.exit_code == 1
    assert result.output.startswith(f"kedge sessions {arguments[0]}: 404: ")
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("what", ["--turn", "--to"])
def test_rewind(served: ServedService, what: str) -> None:
    end = read(served)["checkpoints"][0]["tokens"]
    result = kedge(served, "rewind", "a/b", what, "0" if what == "--turn" else str(end))
    assert (result.exit_code, result.output) == (0, f"a/b: {end:,} tokens are kept\n")
    assert read(served)["tokens"] == end
    assert told(served, "rewind", "a/b", "--turn", "0") == {"session_id": "a/b", "tokens": end}
    assert "now?" not in kedge(served, "show", "a/b").output


@pytest.mark.parametrize("options", [(), ("--turn", "0", "--to", "5")])
def test_rewind_wants_to_know_where_to(shared: ServedService, options: tuple[str, ...]) -> None:
    before = read(shared)["tokens"]
    result = kedge(shared, "rewind", "a/b", *options, columns=200)
    assert result.exit_code == 2
    assert "either --turn TURN or --to TOKENS" in result.output
    assert read(shared)["tokens"] == before


def test_fork_at_a_turn(shared: ServedService) -> None:
    end = read(shared)["checkpoints"][0]["tokens"]
    forked = told(shared, "fork", "a/b", "--turn", "0", "--as", "child")
    assert (forked["session_id"], forked["tokens"]) == ("child", end)
    assert kedge(shared, "fork", "a/b", "--turn", "0", "--at", "1").exit_code == 2


def test_close(served: ServedService) -> None:
    httpx.post(f"{served.address}/v1/kedge/sessions", json={"session_id": "other"})
    result = kedge(served, "close", "a/b", "other")
    assert (result.exit_code, result.output) == (0, "a/b: closed\nother: closed\n")
    assert told(served) == {"sessions": []}


def test_close_tells_what_it_closed_before_it_failed(served: ServedService) -> None:
    result = CliRunner().invoke(
        app, ["sessions", "close", "a/b", "unknown", "--url", served.address, "--json"]
    )
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"closed": ["a/b"]}
    assert re.fullmatch(r"kedge sessions close: 404: .+ \(unknown\)\n", result.stderr), "it is told which one"


def test_move_to_where_it_is(shared: ServedService) -> None:
    result = kedge(shared, "move", "a/b", "--to", REPLICA_ID)
    assert (result.exit_code, result.output) == (0, f"a/b: is at {REPLICA_ID} already, epoch 1\n")
    assert told(shared, "move", "a/b", "--to", REPLICA_ID) == {
        "session_id": "a/b",
        "from": REPLICA_ID,
        "to": REPLICA_ID,
        "epoch": 1,
        "moved": False,
    }


@pytest.mark.parametrize(("to", "status"), [(("--to", "elsewhere"), "400"), ((), "503")])
def test_move_says_why_not(shared: ServedService, to: tuple[str, ...], status: str) -> None:
    result = kedge(shared, "move", "a/b", *to)
    assert result.exit_code == 1
    assert result.output.startswith(f"kedge sessions move: {status}: ")


def test_another_tenants_session_is_named_with_its_tenant(shared: ServedService) -> None:
    httpx.post(
        f"{shared.address}/v1/kedge/sessions", json={"session_id": "s"}, headers={"x-tenant-id": "acme"}
    )
    assert kedge(shared, "show", "s").exit_code == 1
    for arguments in (("show", "s", "--tenant", "acme"), ("--tenant", "acme", "show", "s")):
        assert "tenant   acme" in kedge(shared, *arguments).output
    assert [row["session_id"] for row in told(shared, "--tenant", "acme")["sessions"]] == ["s"]


def test_turns_without_words_of_their_own() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ends = [(None, 2, 5), (0, 4, 9), (1, 2, 5)]  # a parent's turn, a turn of token ids, an edited turn
    checkpoints = [{"turn": turn, "messages": count, "tokens": tokens} for turn, count, tokens in ends]
    turns = list(turns_of(messages, checkpoints))
    assert [(turn.number, len(turn.messages), turn.tokens, turn.end) for turn in turns] == [
        (None, 2, 5, 5),
        (0, 0, 4, 9),
        (1, 0, -4, 5),
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "hello"}, "hello"),
        ({"content": None}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "a [image_url]"),
        (
            {"content": "", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]},
            ' [calls look({"at": 1})]',
        ),
    ],
)
def test_what_a_message_says(message: dict[str, Any], words: str) -> None:
    assert said(message) == words
