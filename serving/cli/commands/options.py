"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from serving.cli.commands.completion import replica_ids, session_ids

DEFAULT_URL = "http://127.0.0.1:8000"

API_KEY_HELP = "The API key, if the server wants one."
URL_HELP = "Address of the server, without /v1."
TENANT_HELP = "The tenant that owns the sessions, for keys without a tenant, such as an operator's."

ApiKey = Annotated[str | None, typer.Option(envvar="KEDGE_API_KEY", show_envvar=True, help=API_KEY_HELP)]
Url = Annotated[str, typer.Option(envvar="KEDGE_URL", help=URL_HELP)]
Tenant = Annotated[str | None, typer.Option(envvar="KEDGE_TENANT", help=TENANT_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

# For the commands below `kedge sessions`: an option that is left out has the value given to `kedge sessions`.
OwnUrl = Annotated[
    str | None, typer.Option("--url", help="Address of the server; that of `kedge sessions` if left out.")
]
OwnApiKey = Annotated[str | None, typer.Option("--api-key", help=API_KEY_HELP)]
OwnTenant = Annotated[str | None, typer.Option("--tenant", help=TENANT_HELP)]
SessionId = Annotated[
    str, typer.Argument(help="The session's id, as `kedge sessions` shows it.", autocompletion=session_ids)
]
SessionIds = Annotated[
    list[str],
    typer.Argument(help="The sessions' ids, as `kedge sessions` shows them.", autocompletion=session_ids),
]
ReplicaId = Annotated[
    str, typer.Argument(help="The replica's id, as `kedge info` shows it.", autocompletion=replica_ids)
]
