"""The `kedge` command. Starts fast: nothing here imports torch or Ray."""

from __future__ import annotations

import typer

from serving.commands.bench import bench
from serving.commands.chat import chat
from serving.commands.sessions import sessions

app = typer.Typer(
    name="kedge",
    help="Talk to, look into and measure a Kedge server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(chat)
app.command()(sessions)
app.command()(bench)


def main() -> None:
    """Entry point of the installed command."""
    app()
