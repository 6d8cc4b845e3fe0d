"""`kedge drain`: empties a replica and has it replaced."""

from __future__ import annotations

import json
from urllib.parse import quote

import typer

from serving.cli.client.server import ask_kedge, checked_name, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, AsJson, ReplicaId, Url

TIMEOUT_S = 30.0


def drain(
    replica: ReplicaId,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Drain a replica: it hands over its sessions, finishes its turns and ends. Ray Serve then starts another one."""
    with one_line_errors("drain"), server_at(url, api_key, timeout=TIMEOUT_S) as client:
        path = f"/v1/kedge/replicas/{quote(checked_name(replica, 'REPLICA'), safe='')}/drain"
        reply = ask_kedge(client, "POST", path, fields=("replica_id",))
    if as_json:
        typer.echo(json.dumps(reply))
        return
    typer.echo(f"{replica} drains; it is replaced once it is empty")
