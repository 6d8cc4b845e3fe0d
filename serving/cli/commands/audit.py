"""`kedge audit`: does every KV page of every replica have exactly one account, and if not, who had it last?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.table import Table

from serving.cli.client.server import ask_kedge, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, AsJson, Url
from serving.cli.commands.output import output

AUDIT_PATH = "/v1/kedge/audit"
ACCOUNTS = ("total", "free", "cached", "protected", "session", "in_flight", "leaked")
EXIT_NOT_CLEAN = 1
_MIB = 1024 * 1024


def audit(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Check every KV page of every replica. Exit status 1 if a page is lost, counted twice or could not be checked."""
    with one_line_errors("audit"), server_at(url, api_key, timeout=60.0) as client:
        found = ask_kedge(client, "GET", AUDIT_PATH, fields=("clean", "error", "replicas"))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console = output()
        console.print(_table(found["replicas"]))
        for line in _complaints(found):
            console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print("clean" if found["clean"] else "not clean")
    if not found["clean"]:
        raise typer.Exit(EXIT_NOT_CLEAN)


def _table(replicas: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)  # ten columns must fit into 80 characters
    table.add_column("replica", overflow="fold")
    table.add_column("pool", overflow="fold")
    for account in ACCOUNTS:
        table.add_column(account.replace("_", "\n"), justify="right", overflow="fold")
    tiers = ["host", "disk"] if any(map(_has_disk, replicas)) else ["host"]
    for tier in tiers:
        table.add_column(f"{tier}\nMiB", justify="right", overflow="fold")
    for replica in replicas:
        name, used = str(replica["replica_id"]), [_used(replica[tier]) for tier in tiers]
        if not replica["pools"]:
            table.add_row(name, "-", *("?" for _ in ACCOUNTS), *used)
        for pool, pages in replica["pools"].items():
            table.add_row(name, pool, *(f"{pages[account]:,}" for account in ACCOUNTS), *used)
            name, used = "", []
    return table


def _has_disk(replica: Mapping[str, Any]) -> bool:
    return replica["disk"] is not None and replica["disk"]["budget_bytes"] > 0


def _used(accounts: Mapping[str, int] | None) -> str:
    if accounts is None:
        return "?"
    if not accounts["budget_bytes"]:
        return "off"
    return f"{accounts['used_bytes'] / _MIB:,.1f}/{accounts['budget_bytes'] / _MIB:,.0f}"


def _complaints(found: Mapping[str, Any]) -> Iterator[str]:
    if found["error"]:
        yield found["error"]
    for replica in found["replicas"]:
        name = replica["replica_id"]
        if replica["error"]:
            yield f"{name}: {replica['error']}"
        for mismatch in replica["mismatches"]:
            yield f"{name}: {mismatch}"
        for finding in replica["findings"]:
            yield f"{name}: {_sentence(finding)}"


def _sentence(finding: Mapping[str, Any]) -> str:
    where = f" in {' and in '.join(finding['accounts'])}" if finding["accounts"] else ""
    return f"page {finding['page']} of pool {finding['pool']} is {finding['kind']}{where}; {_last(finding['last'])}"


def _last(trace: Mapping[str, Any] | None) -> str:
    if trace is None:
        return "never used"
    owner = "no session" if trace["session"] is None else f"session {trace['session']}"
    if trace["rid"] is not None:
        owner += f", rid {trace['rid']}"
    if trace["tenant"]:
        owner += f" of {trace['tenant']}"
    if trace["request"] is not None:
        owner += f", request {trace['request']}"
    return f"last {trace['operation']} by {owner} {trace['age_s']:.1f} s ago"
