"""How a command fails: one line on standard error and exit status 1, or 2 if it was called wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from serving.cli.client.server import ServerError
from serving.cli.load.settings import LoadError
from serving.cli.start.errors import StartError


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Turns errors that the user can act on into a message without a traceback."""
    try:
        yield
    except (ServerError, LoadError, StartError) as error:
        Console(stderr=True, soft_wrap=True).print(f"kedge {command}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
