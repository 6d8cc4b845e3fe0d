"""The `kedge` command. Starts fast: nothing here imports torch or Ray."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from serving.cli.commands.audit import audit
from serving.cli.commands.bench import bench
from serving.cli.commands.chat import chat
from serving.cli.commands.drain import drain
from serving.cli.commands.info import info
from serving.cli.commands.serve import serve
from serving.cli.commands.sessions import app as sessions_app
from serving.cli.commands.top import top

app = typer.Typer(
    name="kedge",
    help="Start, talk to, look into and measure a Kedge server.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kedge {version('kedge')}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command()(serve)
app.command()(chat)
app.add_typer(sessions_app, name="sessions")
app.command()(info)
app.command()(top)
app.command()(audit)
app.command()(drain)
app.command()(bench)


def main() -> None:
    """Runs the command line."""
    app()
