"""`kedge top`: shows a running cluster in a terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live

from serving.cli.client.server import ServerError, server_at
from serving.cli.client.watch import STATE, watch
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, AsJson, Url
from serving.cli.commands.output import output
from serving.cli.top.frame import frame
from serving.cli.top.picture import Picture

AGAIN_AFTER_S = 1.0
STATES_FOR_RATES = 2
TIMEOUT_S = 10.0

Interval = Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between updates.")]
Once = Annotated[bool, typer.Option("--once", help="Print one picture after one interval, then exit.")]


def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Interval = 1.0,
    once: Once = False,
    as_json: AsJson = False,
) -> None:
    """Watch a cluster: replicas and their KV pages, load, sessions, and events. Ctrl-C ends it.

    Only for operators. If the output is no terminal, or a dumb one, one picture is printed, as with --once. With
    --json, each event of the stream is a line of JSON, with its name under "event"; with --json --once, only the state
    is printed. If the server goes away, kedge waits for it; with --json it ends with exit status 1, as it does if there
    was no server at the start.
    """
    try:
        with one_line_errors("top"), server_at(url, api_key, timeout=TIMEOUT_S) as client:
            if as_json:
                _print_events(client, interval, once=once)
            elif once or not sys.stdout.isatty() or Console().is_dumb_terminal:
                _print_once(client, url, interval)
            else:
                _show(client, url, interval)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print_events(client: httpx.Client, interval_s: float, *, once: bool) -> None:
    for event in watch(client, interval_s):
        if once and event.name != STATE:
            continue
        typer.echo(json.dumps({"event": event.name, **event.data}))
        if once:
            return


def _print_once(client: httpx.Client, url: str, interval_s: float) -> None:
    picture = Picture()
    for event in watch(client, interval_s):
        picture.take(event)
        if picture.states_seen == STATES_FOR_RATES:
            break
    output(highlight=False).print(frame(picture, url))


def _show(client: httpx.Client, url: str, interval_s: float) -> None:
    """Runs until Ctrl-C. Raises ServerError if no state came at all."""
    console, picture = Console(highlight=False), Picture()
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                for event in watch(client, interval_s):
                    picture.take(event)
                    live.update(frame(picture, url, console.height), refresh=True)
            except ServerError as error:
                if picture.state is None:
                    raise
                trouble = f"trying again: {error}"
                live.update(frame(picture, url, console.height, trouble), refresh=True)
            picture.begin_again()
            time.sleep(AGAIN_AFTER_S)
