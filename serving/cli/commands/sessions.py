"""`kedge sessions`: lists the ownership ledger's sessions; its subcommands show or change one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.cli.client.server import ServerError, server_at
from serving.cli.client.sessions import (
    all_sessions,
    close_session,
    fork_session,
    move_session,
    read_session,
    rewind_session,
)
from serving.cli.commands.completion import replica_ids
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    OwnApiKey,
    OwnTenant,
    OwnUrl,
    SessionId,
    SessionIds,
    Tenant,
    Url,
)
from serving.cli.commands.output import output
from serving.cli.commands.session_history import print_session
from serving.cli.commands.wording import counted, duration, size

TIMEOUT_S = 60.0

At = Annotated[int | None, typer.Option(min=0, help="Number of tokens to keep. By default, all.")]
AtTurn = Annotated[
    int | None, typer.Option(min=0, help="Keep this turn and those before it, instead of --at.")
]
ToTurn = Annotated[int | None, typer.Option(min=0, help="Keep this turn and those before it.")]
ToTokens = Annotated[int | None, typer.Option("--to", min=0, help="Keep this many tokens from the start.")]
ToReplica = Annotated[
    str | None,
    typer.Option(
        "--to", help="The new owner. By default, the controller picks it.", autocompletion=replica_ids
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Print long texts in full.")]

app = typer.Typer(help="List sessions, show one, or change it.")


@app.callback(invoke_without_command=True)
def sessions(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """List sessions: owner, epoch, tokens, bytes, turns, idle time.

    The commands below show one session, or change it.
    """
    if context.invoked_subcommand is not None:
        return
    with one_line_errors("sessions"), server_at(url, api_key, timeout=10.0, tenant=tenant) as client:
        rows = all_sessions(client)
    if as_json:
        typer.echo(json.dumps({"sessions": rows}, indent=2))
        return
    output().print(_table(rows) if rows else "no sessions")


@app.command()
def show(
    context: typer.Context,
    session_id: SessionId,
    full: Full = False,
    url: OwnUrl = None,
    api_key: OwnApiKey = None,
    tenant: OwnTenant = None,
    as_json: AsJson = False,
) -> None:
    """Print what was said in a session, turn by turn.

    A turn's checkpoint is the number of tokens at its end. `rewind` and `fork` can go back to it.
    """
    with one_line_errors("sessions show"), _server(context, url, api_key, tenant) as client:
        found = read_session(client, session_id)
    if _wants_json(context, as_json):
        typer.echo(json.dumps(found, indent=2))
        return
    print_session(Console(), found, full=full)


@app.command()
def close(
    context: typer.Context,
    session_ids: SessionIds,
    url: OwnUrl = None,
    api_key: OwnApiKey = None,
    tenant: OwnTenant = None,
    as_json: AsJson = False,
) -> None:
    """End sessions for good.

    Their KV is freed, and their history is deleted from the log. A session with a turn in flight ends with that turn.
    """
    closed: list[str] = []
    try:
        with one_line_errors("sessions close"), _server(context, url, api_key, tenant) as client:
            for session_id in session_ids:
                try:
                    close_session(client, session_id)
                except ServerError as error:
                    if error.status is None:
                        raise
                    raise ServerError(f"{error} ({session_id})", error.status) from error
                closed.append(session_id)
    finally:
        _print(context, as_json, {"closed": closed}, [f"{each}: closed" for each in closed])


@app.command()
def fork(
    context: typer.Context,
    session_id: SessionId,
    at: At = None,
    turn: AtTurn = None,
    new_id: Annotated[str | None, typer.Option("--as", help="Id of the fork. By default, a new one.")] = None,
    url: OwnUrl = None,
    api_key: OwnApiKey = None,
    tenant: OwnTenant = None,
    as_json: AsJson = False,
) -> None:
    """Start a new session with the history of another one. The two share KV."""
    if at is not None and turn is not None:
        raise typer.BadParameter("--at and --turn are two ways to say one thing: give one of them")
    with one_line_errors("sessions fork"), _server(context, url, api_key, tenant) as client:
        forked = fork_session(client, session_id, at=at, turn=turn, new_session_id=new_id)
    said = f"{forked['session_id']}: {forked['tokens']:,} tokens, {forked['cached_tokens']:,} of them with KV"
    _print(context, as_json, forked, [said])


@app.command()
def rewind(
    context: typer.Context,
    session_id: SessionId,
    turn: ToTurn = None,
    to: ToTokens = None,
    url: OwnUrl = None,
    api_key: OwnApiKey = None,
    tenant: OwnTenant = None,
    as_json: AsJson = False,
) -> None:
    """Take back the last turns of a session.

    `kedge sessions show` prints their numbers. Turns that are cut off are lost. To keep them, fork the session first.
    """
    if (to is None) == (turn is None):
        raise typer.BadParameter("say what is to be kept: either --turn TURN or --to TOKENS")
    with one_line_errors("sessions rewind"), _server(context, url, api_key, tenant) as client:
        kept = rewind_session(client, session_id, to=to, turn=turn)
    _print(context, as_json, kept, [f"{kept['session_id']}: {kept['tokens']:,} tokens are kept"])


@app.command()
def move(
    context: typer.Context,
    session_id: SessionId,
    to: ToReplica = None,
    url: OwnUrl = None,
    api_key: OwnApiKey = None,
    tenant: OwnTenant = None,
    as_json: AsJson = False,
) -> None:
    """Move a session to another replica, which owns it from the next turn on.

    The history moves with it. The KV is computed again with the next turn, so that its first token comes later. A
    session with a turn in flight does not move. Only for operators.
    """
    with one_line_errors("sessions move"), _server(context, url, api_key, tenant) as client:
        moved = move_session(client, session_id, to)
    said = f"moved from {moved['from']} to {moved['to']}"
    if not moved["moved"]:
        said = f"is at {moved['to']} already"
    _print(context, as_json, moved, [f"{moved['session_id']}: {said}, epoch {moved['epoch']}"])


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The most recently used sessions come first."""
    title = counted(len(rows), "session")
    # Without lines, a generated id and the other columns fit into 80 characters.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("session", overflow="fold")
    table.add_column("owner", overflow="fold")
    for name in ("epoch", "tokens", "KV", "turns", "idle"):
        table.add_column(name, justify="right")
    # Few sessions have a tenant, or a `rid` (their requests form a tree).
    others = [name for name in ("rid", "tenant") if any(row.get(name) for row in rows)]
    for name in others:
        table.add_column(name, overflow="fold")
    for row in sorted(rows, key=lambda row: float(row["idle_s"])):
        cells: list[Text | str] = [
            Text(str(row["session_id"])),  # clients choose ids, and brackets are no markup
            str(row["replica_id"] or "-"),
            str(row["epoch"]),
            f"{row['tokens']:,}",
            size(int(row["size_bytes"])),
            str(row["turns"]),
            "in turn" if row["in_turn"] else duration(float(row["idle_s"])),
        ]
        table.add_row(*cells, *(Text(str(row.get(name) or "")) for name in others))
    return table


def _server(context: typer.Context, url: str | None, api_key: str | None, tenant: str | None) -> httpx.Client:
    """A client for the server that the command line names. Options left out have the value of `kedge sessions`."""
    above = {} if context.parent is None else context.parent.params
    return server_at(
        url or above.get("url") or DEFAULT_URL,
        api_key or above.get("api_key"),
        timeout=TIMEOUT_S,
        tenant=tenant or above.get("tenant"),
    )


def _wants_json(context: typer.Context, as_json: bool) -> bool:
    return as_json or (context.parent is not None and bool(context.parent.params.get("as_json")))


def _print(context: typer.Context, as_json: bool, reply: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Prints what was done: as the server says it, or in words."""
    if _wants_json(context, as_json):
        typer.echo(json.dumps(reply))
        return
    for line in lines:
        typer.echo(line)
