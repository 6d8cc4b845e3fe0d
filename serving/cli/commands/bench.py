"""`kedge bench`: multi-turn load against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving.cli.client.server import check_url, first_model, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, Url
from serving.cli.load.machine import describe_machine
from serving.cli.load.report import document, table
from serving.cli.load.sample import LoadResult, TurnSample
from serving.cli.load.server_processes import find_server_pids
from serving.cli.load.settings import Endpoint, LoadError, LoadSettings, Mode, PromptKind
from serving.cli.load.summary import Limits, Summary, summarize

EXIT_REJECTED = 3
"""Exit status of a run that completed but cannot be trusted."""
LIMITS = Limits()

SilenceTimeout = Annotated[
    float, typer.Option(min=0.1, help="A turn fails after this many seconds without a byte.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Sessions at the same time. By default, all.")]
KeepAlive = Annotated[bool, typer.Option(help="Use one connection for many turns.")]
MaxBurstShare = Annotated[
    float, typer.Option(help="A larger share of bursts rejects the run, if the client was late.")
]
MaxOtherCores = Annotated[
    float, typer.Option(help="CPU use by other processes above this many cores rejects the run.")
]
AllowFailedTurns = Annotated[
    bool, typer.Option("--allow-failed-turns", help="Failed turns are only counted.")
]
SERVER_PID_HELP = (
    "Process id of the server, so that its CPU use does not count as other processes'. Kedge's is found."
)


def bench(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model id. By default, the server's first model.")] = None,
    mode: Annotated[Mode, typer.Option(help="Send the new message, or all history.")] = Mode.SESSION,
    endpoint: Annotated[Endpoint, typer.Option(help="The OpenAI endpoint to call.")] = Endpoint.CHAT,
    prompt: Annotated[
        PromptKind, typer.Option(help="With ids, prompts have the exact length. Only for completions.")
    ] = PromptKind.TEXT,
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each session.")] = 10,
    input_tokens: Annotated[int, typer.Option(min=1, help="New tokens sent per turn.")] = 16,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per turn.")] = 16,
    concurrency: Concurrency = None,
    warmup: Annotated[int, typer.Option(min=0, help="Sessions that run before the measurement.")] = 2,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="With ids, token ids are below this number.")] = 1000,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of the full length.")] = True,
    timeout: SilenceTimeout = 120.0,
    keep_alive: KeepAlive = True,
    server_pid: Annotated[list[int] | None, typer.Option(min=1, help=SERVER_PID_HELP)] = None,
    max_burst_share: MaxBurstShare = LIMITS.burst_share,
    max_other_cores: MaxOtherCores = LIMITS.other_cores,
    allow_failed_turns: AllowFailedTurns = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
) -> None:
    """Measure TTFT, time per token and throughput of multi-turn sessions.

    Exit status: 0 measured; 1 the server is down, or a turn failed; 3 measured, but the figures are rejected.
    On a small machine, run `chrt -f 50 kedge bench ...`. Otherwise the server leaves the client too little CPU time.
    """
    console = Console()
    with one_line_errors("bench"):
        check_url(url)
        _check_writable(json_file)
        settings = LoadSettings(
            url=url.rstrip("/"),
            model=model or _ask_model(url, api_key),
            mode=mode,
            endpoint=endpoint,
            prompt=prompt,
            sessions=sessions,
            turns=turns,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            concurrency=min(concurrency or sessions, sessions),
            warmup=warmup,
            seed=seed,
            vocab_size=vocab_size,
            ignore_eos=ignore_eos,
            timeout_s=timeout,
            keep_alive=keep_alive,
        )
        result = _run(console, settings, api_key, server_pid)
        summary = _report(console, settings, Limits(max_burst_share, max_other_cores), result, json_file)
        if summary.turns_failed and not allow_failed_turns:
            raise LoadError(_told_failures(summary))
    if summary.rejected:
        raise typer.Exit(EXIT_REJECTED)


def _check_writable(path: Path | None) -> None:
    """Checks the path before the measurement, whose result would be lost otherwise."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise LoadError(f"--json: {path} cannot be written: {error.strerror}") from error


def _check_processes(pids: Sequence[int]) -> None:
    """The CPU use of a server that is not found would count as others', which rejects the run."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except PermissionError:
            continue  # another user's
        except (ProcessLookupError, OverflowError) as error:
            raise LoadError(f"--server-pid: there is no process {pid}") from error


def _ask_model(url: str, api_key: str | None) -> str:
    with server_at(url, api_key, timeout=10.0) as client:
        return first_model(client)


def _run(
    console: Console, settings: LoadSettings, api_key: str | None, server_pid: list[int] | None
) -> LoadResult:
    """Runs the load under a progress bar that redraws rarely, since drawing takes CPU time from the client."""
    from serving.cli.load.runner import (
        LoadRun,  # here, because importing aiohttp would slow the other commands
    )

    _check_processes(server_pid or ())
    server_pids = tuple(server_pid or find_server_pids(settings.url, api_key))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("warming up", total=settings.sessions * settings.turns, last="")

        def on_turn(sample: TurnSample) -> None:
            last = sample.error or f"TTFT {sample.ttft_s * 1e3:.1f} ms"
            progress.update(task, advance=1, description="turns", last=last)

        load = LoadRun(settings, on_turn=on_turn, api_key=api_key, server_pids=server_pids)
        return asyncio.run(load.run())


def _report(
    console: Console,
    settings: LoadSettings,
    limits: Limits,
    result: LoadResult,
    json_file: Path | None,
) -> Summary:
    """Prints and writes the figures."""
    summary = summarize(settings, result, limits)
    if json_file is not None:
        json_file.write_text(
            json.dumps(document(settings, limits, summary, result, describe_machine()), indent=1) + "\n"
        )
    console.print(table(settings, summary, result.cpu))
    for reason, count in summary.errors.items():
        console.print(f"{count} × {reason}", style="red", markup=False, soft_wrap=True)
    for note in summary.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for reason in summary.rejected:
        console.print(f"REJECTED: {reason}", style="bold red", markup=False, soft_wrap=True)
    return summary


def _told_failures(summary: Summary) -> str:
    total = summary.turns_ok + summary.turns_failed + summary.turns_skipped
    skipped = f", so {summary.turns_skipped} more were not sent" if summary.turns_skipped else ""
    return f"{summary.turns_failed} of {total} turns failed{skipped}"
