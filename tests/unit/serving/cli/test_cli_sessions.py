"""`kedge sessions`: the ledger as a table and as JSON; forks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from serving.cli.main import app
from tests.unit.serving.openai_stub import Stub, running

LEDGER = [
    {
        "session_id": "late",
        "replica_id": "r1",
        "epoch": 2,
        "tokens": 12345,
        "size_bytes": 2_500_000,
        "turns": 7,
        "idle_s": 125.0,
        "in_turn": False,
        "tenant": "",
    },
    {
        "session_id": "busy",
        "replica_id": None,
        "epoch": 1,
        "tokens": 0,
        "size_bytes": 0,
        "turns": 0,
        "idle_s": 0.0,
        "in_turn": True,
        "tenant": "",
    },
]


def sessions(stub: Stub, *options: str):
    return CliRunner().invoke(app, ["sessions", "--url", stub.url, *options], env={"COLUMNS": "160"})


def test_table_names_owner_tokens_bytes_and_idle_time():
    with running(Stub(ledger=LEDGER)) as stub:
        result = sessions(stub)
    assert result.exit_code == 0
    late = next(line for line in result.output.splitlines() if "late" in line)
    for cell in ("r1", "12,345", "2.4 MiB", "7", "2 min 05 s"):
        assert cell in late
    busy = next(line for line in result.output.splitlines() if "busy" in line)
    assert "in turn" in busy
    assert "tenant" not in result.output


def test_ids_are_no_markup():
    """Clients choose ids. One of them could end an operator's list in a traceback, or hide in it."""
    ledger = [LEDGER[0] | {"session_id": each, "tenant": "[/t]"} for each in ("[/a]", "[red]x")]
    with running(Stub(ledger=ledger)) as stub:
        result = sessions(stub)
    assert result.exit_code == 0, result.output
    assert all(each in result.output for each in ("[/a]", "[red]x", "[/t]"))


def test_all_pages_are_listed():
    ledger = [LEDGER[0] | {"session_id": f"s{number}"} for number in range(5)]
    with running(Stub(ledger=ledger)) as stub:
        table, listed = sessions(stub), sessions(stub, "--json")
    assert "5 sessions" in table.output
    assert [row["session_id"] for row in json.loads(listed.output)["sessions"]] == [f"s{n}" for n in range(5)]


def test_a_generated_id_is_not_broken_at_80_columns():
    row = LEDGER[0] | {"session_id": "x" * 22, "replica_id": "4xejy4ey", "tokens": 1_234_567, "turns": 12345}
    with running(Stub(ledger=[row])) as stub:
        result = CliRunner().invoke(app, ["sessions", "--url", stub.url], env={"COLUMNS": "80"})
    assert "x" * 22 in result.output
    assert len(result.output.splitlines()) == 3, result.output


def test_into_a_file_a_session_is_one_line(monkeypatch: pytest.MonkeyPatch):
    """`kedge sessions | grep ID` found nothing: long ids were broken as if for a terminal of 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    row = LEDGER[0] | {"session_id": "x" * 200, "tenant": "t" * 200}
    with running(Stub(ledger=[row])) as stub:
        result = CliRunner().invoke(app, ["sessions", "--url", stub.url])
    (line,) = (line for line in result.output.splitlines() if "x" * 200 in line)
    assert "t" * 200 in line
    assert "\x1b" not in result.output


def test_fork_says_what_its_url_is():
    output = CliRunner().invoke(app, ["sessions", "fork", "--help"], env={"COLUMNS": "160"}).output
    assert "Address of the server; that of `kedge sessions` if left out." in output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"kedge {version('kedge')}\n"


def test_tenants_are_shown_where_there_are_any():
    with running(Stub(ledger=[LEDGER[0] | {"tenant": "acme"}])) as stub:
        assert "acme" in sessions(stub).output


def test_requests_of_trees_are_told_by_their_names():
    with running(Stub(ledger=[LEDGER[0] | {"rid": None}, LEDGER[0] | {"rid": "branch"}])) as stub:
        output = sessions(stub).output
    assert "rid" in output
    assert [line.split()[0] for line in output.splitlines() if "branch" in line] == ["late"]
    assert "None" not in output


def test_json_is_the_ledger_as_it_came():
    with running(Stub(ledger=LEDGER)) as stub:
        assert json.loads(sessions(stub, "--json").output) == {"sessions": LEDGER}


def test_no_sessions():
    with running(Stub()) as stub:
        assert sessions(stub).output == "no sessions\n"


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ([], {}),
        (["--at", "4", "--as", "mine"], {"length": 4, "new_session_id": "mine"}),
        (["--at", "0"], {"length": 0}),
    ],
)
@pytest.mark.parametrize("url_last", [True, False])
def test_fork(options: list[str], body: dict[str, object], url_last: bool):
    with running(Stub(history={"long/one": 1234})) as stub:
        url = ["--url", stub.url]
        order = ["fork", "long/one", *options]
        arguments = [*order, *url] if url_last else [*url, *order]
        result = CliRunner().invoke(app, ["sessions", *arguments])
        assert result.exit_code == 0, result.output
        assert stub.bodies == [body]
    tokens = body.get("length", 1234)
    name = body.get("new_session_id", "fork-1")
    assert result.output == f"{name}: {tokens:,} tokens, 3 of them with KV\n"


def test_fork_of_an_unknown_session():
    with running(Stub()) as stub:
        result = CliRunner().invoke(app, ["sessions", "fork", "x", "--url", stub.url])
    assert result.exit_code == 1
    assert "kedge sessions fork: 404: no such session" in result.output


def test_the_command_loads_neither_torch_nor_ray():
    code = (
        "import sys, serving.cli.main;"
        "print(*({'torch', 'ray', 'transformers', 'fastapi', 'numpy', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
