"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="KEDGE_API_KEY", show_envvar=True, help="Sent with every call, where the server wants one."
    ),
]
Url = Annotated[str, typer.Option(envvar="KEDGE_URL", help="Address of the server, without /v1.")]
