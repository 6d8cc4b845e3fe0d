"""`kedge drain`: empties a replica and has it replaced."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from serving.cli.client.server import request_json, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, Url

TIMEOUT_S = 30.0


def drain(
    replica: Annotated[str, typer.Argument(help="The replica's id, as `kedge sessions` shows it.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Have a replica hand its sessions over, end its turns and end itself. Ray Serve then starts another one."""
    with one_line_errors("drain"), server_at(url, api_key, timeout=TIMEOUT_S) as client:
        request_json(client, "POST", f"/v1/kedge/replicas/{quote(replica, safe='')}/drain")
    typer.echo(f"{replica} drains; it is replaced once it is empty")
