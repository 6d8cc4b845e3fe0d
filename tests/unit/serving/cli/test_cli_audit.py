"""`kedge audit`: a table of the books, a sentence for every finding, and an exit status for scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from serving.cli.main import app
from tests.unit.serving.openai_stub import Stub, running

BOOKS = {
    "total": 2048,
    "free": 2000,
    "cached": 10,
    "protected": 20,
    "session": 15,
    "in_flight": 3,
    "leaked": 0,
}
HOST = {"budget_bytes": 512 * 2**20, "used_bytes": 3 * 2**19, "sessions": 3}
DISK = {"budget_bytes": 0, "used_bytes": 0, "sessions": 0}


def replica(name: str, **changes: Any) -> dict[str, Any]:
    found = {
        "replica_id": name,
        "clean": True,
        "pools": {"full": BOOKS, "window": BOOKS | {"total": 99}},
        "host": HOST,
        "disk": DISK,
    }
    return found | {"findings": [], "mismatches": [], "error": None} | changes


def audit(
    *replicas: dict[str, Any], error: str | None = None, options: tuple[str, ...] = (), columns: int = 140
):
    clean = error is None and all(each["clean"] for each in replicas)
    found = {"clean": clean, "error": error, "replicas": list(replicas)}
    with running(Stub(audit=found)) as stub:
        result = CliRunner().invoke(
            app, ["audit", "--url", stub.url, *options], env={"COLUMNS": str(columns)}
        )
    return result, found


def test_clean_books():
    result, _ = audit(replica("r1"), replica("r2", host=HOST | {"budget_bytes": 0}))
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "clean"
    full, window = [line for line in result.output.splitlines() if "full" in line or "window" in line][:2]
    for cell in ("r1", "2,048", "2,000", "15", "1.5/512"):
        assert cell in full
    assert "99" in window
    assert "off" in result.output


def test_a_disk_has_a_column_where_there_is_one():
    disk = {"budget_bytes": 2048 * 2**20, "used_bytes": 99 * 2**20, "sessions": 7}
    result, _ = audit(replica("r1", disk=disk), replica("r2"))
    rows = [line.split() for line in result.output.splitlines() if "full" in line]
    assert [row[-2:] for row in rows] == [["1.5/512", "99.0/2,048"], ["1.5/512", "off"]]
    assert "disk" not in audit(replica("r2"))[0].output


def test_the_table_fits_into_80_columns():
    books = {"window": BOOKS | {"total": 65_536, "free": 60_000}}
    result, _ = audit(replica("vkz6qq31", pools=books), columns=80)
    header, row = result.output.splitlines()[-3:-1]
    for name in ("cached", "protected", "session", "leaked"):
        assert name in header
    for cell in ("vkz6qq31", "window", "65,536", "60,000", "1.5/512"):
        assert cell in row


def test_every_finding_is_named_with_its_last_owner():
    last = {
        "operation": "allocated",
        "session": "anna-1",
        "rid": None,
        "tenant": "",
        "request": "chat-7#3",
        "age_s": 12.34,
    }
    leaked = {"kind": "leaked", "pool": "full", "page": 7, "accounts": [], "last": last}
    twice = {
        "kind": "doubly accounted",
        "pool": "window",
        "page": 8,
        "accounts": ["free", "session a"],
        "last": None,
    }
    nobody = {**leaked, "page": 9, "last": {**last, "session": None, "request": None}}
    tree = {**leaked, "page": 10, "last": {**last, "rid": "node", "tenant": "acme"}}
    wrong = replica(
        "r1", clean=False, findings=[leaked, twice, nobody, tree], mismatches=["cached: 3 counted, 4 found"]
    )
    result, _ = audit(wrong, replica("r2"))
    assert result.exit_code == 1
    said = result.output.splitlines()
    owner = "last allocated by session anna-1, request chat-7#3 12.3 s ago"
    assert f"r1: page 7 of pool full is leaked; {owner}" in said
    assert "r1: page 8 of pool window is doubly accounted in free and in session a; never used" in said
    owner = "last allocated by session anna-1, rid node of acme, request chat-7#3 12.3 s ago"
    assert f"r1: page 10 of pool full is leaked; {owner}" in said
    assert "r1: page 9 of pool full is leaked; last allocated by no session 12.3 s ago" in said
    assert "r1: cached: 3 counted, 4 found" in said
    assert said[-1] == "not clean"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_replica_that_was_not_looked_at_is_not_clean(options: tuple[str, ...]):
    silent = replica("r2", clean=False, pools={}, host=None, disk=None, error="the replica did not answer")
    result, found = audit(replica("r1"), silent, options=options)
    assert result.exit_code == 1
    if options:
        assert json.loads(result.output) == found
    else:
        assert "r2: the replica did not answer" in result.output.splitlines()


def test_no_controller_no_verdict():
    result, _ = audit(replica("r1"), error="who should have answered is not known")
    assert result.exit_code == 1
    assert "who should have answered is not known" in result.output
