"""`kedge sessions`: what the ownership ledger knows of every session. `kedge sessions fork`: one more of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from serving.cli.client.server import all_sessions, fork_session, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, Url


def sessions(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger as JSON.")] = False,
) -> None:
    """List sessions: owner, epoch, tokens, bytes, turns, idle time."""
    if context.invoked_subcommand is not None:
        return
    with one_line_errors("sessions"), server_at(url, api_key, timeout=10.0) as client:
        rows = all_sessions(client)
    if as_json:
        typer.echo(json.dumps({"sessions": rows}, indent=2))
        return
    Console().print(_table(rows) if rows else "no sessions")


def fork(
    context: typer.Context,
    session_id: Annotated[str, typer.Argument(help="Session to fork.")],
    at: Annotated[int | None, typer.Option(min=0, help="Tokens to begin with; all if left out.")] = None,
    new_id: Annotated[str | None, typer.Option("--as", help="Id of the fork; a new one if left out.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the server; that of `kedge sessions` if left out.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Start a session at the history of another, sharing its KV."""
    assert context.parent is not None
    url, api_key = url or context.parent.params["url"], api_key or context.parent.params["api_key"]
    with one_line_errors("sessions fork"), server_at(url, api_key, timeout=60.0) as client:
        forked = fork_session(client, session_id, at=at, new_session_id=new_id)
    typer.echo(
        f"{forked['session_id']}: {forked['tokens']:,} tokens, {forked['cached_tokens']:,} of them with KV"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"{len(rows)} session{'s' if len(rows) != 1 else ''}"
    # Without lines a generated id fits into 80 characters beside the rest.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("session", overflow="fold")
    table.add_column("owner", overflow="fold")
    for name in ("epoch", "tokens", "KV", "turns", "idle"):
        table.add_column(name, justify="right")
    # Few have a tenant, or requests of trees.
    others = [name for name in ("rid", "tenant") if any(row.get(name) for row in rows)]
    for name in others:
        table.add_column(name, overflow="fold")
    for row in sorted(rows, key=lambda row: float(row["idle_s"])):
        cells = [
            str(row["session_id"]),
            str(row["replica_id"] or "-"),
            str(row["epoch"]),
            f"{row['tokens']:,}",
            decimal(int(row["size_bytes"])),
            str(row["turns"]),
            "in turn" if row["in_turn"] else _duration(float(row["idle_s"])),
        ]
        table.add_row(*cells, *(str(row.get(name) or "") for name in others))
    return table


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
