"""`kedge chat`: a conversation in a terminal, as one session on the server."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.segment import Segment, Segments

from serving.cli.client.conversation import ServedSession, TurnTiming
from serving.cli.client.server import ServerError, checked_name, first_model, server_at
from serving.cli.commands.failure import one_line_errors
from serving.cli.commands.options import DEFAULT_URL, ApiKey, Url
from serving.cli.commands.printable import printable

HELP = """\
/reset   start a new session
/quit    leave (also Ctrl-D)
/help    this list
Ctrl-C   stop the answer; the session stands where it was before the turn
Sessions that this chat started are closed; one named by --session stays open."""

RunTurn = Callable[[Console, ServedSession, str], None]
"""Runs a turn and prints it. Raises ServerError."""

TIMEOUT = httpx.Timeout(10.0, read=300.0)


def chat(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    session: Annotated[
        str | None,
        typer.Option(help="Session to continue, which stays open afterwards. By default, a new one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model id. By default, the server's first model.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt of a new session.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. By default, the server's.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each turn as a line of JSON.")] = False,
) -> None:
    """Talk to the model. Each turn sends only the new message; the server keeps the session's KV cache.

    Exit status: 1 if a turn failed.
    """
    # With --json, standard output has only the turns.
    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    run_turn = _print_turn_as_json if as_json else _print_turn
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    with one_line_errors("chat"), server_at(url, api_key, timeout=TIMEOUT) as client:
        if session is not None:
            checked_name(session, "--session")
        model_id = model or first_model(client)

        def start(session_id: str | None) -> ServedSession:
            session_id = session_id or f"chat-{uuid.uuid4().hex[:12]}"
            console.print(
                f"session {session_id}, model {model_id}; /help lists commands", style="dim", markup=False
            )
            return ServedSession(client, session_id, model_id, system, sampling)

        if not _talk(console, start, run_turn, session):
            raise typer.Exit(1)


def _talk(
    console: Console,
    start: Callable[[str | None], ServedSession],
    run_turn: RunTurn,
    session_id: str | None,
) -> bool:
    """Returns False if a turn failed."""
    conversation, ours = start(session_id), session_id is None
    all_well = True
    try:
        for line in _lines(console):
            if line == "/help":
                console.print(HELP, style="dim")
            elif line == "/reset":
                _leave(console, conversation, ours)
                conversation, ours = start(None), True
            elif line == "/quit":
                break
            elif line.startswith("/"):
                console.print(f"unknown command {line}; /help lists them", style="dim", markup=False)
            elif line:
                all_well &= _run_turn(console, conversation, line, run_turn)
    finally:
        _leave(console, conversation, ours)
    return all_well


def _leave(console: Console, conversation: ServedSession, ours: bool) -> None:
    """Closes the session if this chat started it. A session that the user named may be in use elsewhere."""
    if ours:
        conversation.close()
    else:
        console.print(f"session {conversation.session_id} stays open", style="dim", markup=False)


def _lines(console: Console) -> Iterator[str]:
    """The user's lines until end of input. A terminal gets a prompt; Ctrl-C there clears the line."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            yield line.decode(errors="replace").strip()
        return
    import readline  # noqa: F401  (line editing and history for `input`)

    prompt = "" if console.stderr or not sys.stdout.isatty() else "> "  # `input` prompts on standard output
    while True:
        try:
            if not prompt:
                typer.echo("> ", nl=False, err=True)
            yield input(prompt).strip()
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D or /quit leaves)", style="dim")
        except EOFError:
            console.print()
            return


def _run_turn(console: Console, conversation: ServedSession, text: str, run_turn: RunTurn) -> bool:
    """Runs a turn. If it fails, reports it on standard error and returns False; the conversation goes on."""
    try:
        run_turn(console, conversation, text)
        conversation.commit()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise  # nobody is there to say the next line
        console.print("\n(stopped; the session stands where it was before this turn)", style="dim")
        return True
    except ServerError as error:
        console.print()
        Console(stderr=True, soft_wrap=True).print(f"kedge chat: {error}", style="red", markup=False)
        return False
    return True


def _print_turn(console: Console, conversation: ServedSession, text: str) -> None:
    """Prints the thoughts, dim, and the answer as they come, then its timing. Control characters of the model do not
    reach a terminal."""

    def show(piece: str, style: str | None = None) -> None:
        if piece:
            # As a text, tabs would become spaces, and words between colons emoji.
            said = printable(piece) if console.is_terminal else piece
            console.print(Segments([Segment(said, console.get_style(style) if style else None)]), end="")

    with conversation.turn(text) as stream:
        thinks = False
        for chunk in stream:
            show("\n" if thinks and not chunk.thought else "")
            thinks = bool(chunk.thought)
            show(chunk.thought, "dim")
            show(chunk.text)
    console.print()
    if stream.timing is not None:
        console.print(_summary(stream.timing, stream.finish_reason), style="dim")


def _print_turn_as_json(_console: Console, conversation: ServedSession, text: str) -> None:
    """Prints the turn once it has ended; what neither server nor turn tells is null."""
    with conversation.turn(text) as stream:
        chunks = list(stream)
    timing = stream.timing
    usage = None if timing is None else timing.usage
    told = {
        "session_id": conversation.session_id,
        "text": "".join(chunk.text for chunk in chunks),
        "reasoning": "".join(chunk.thought for chunk in chunks) or None,
        "finish_reason": stream.finish_reason,
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "ttft_s": None if timing is None else timing.first_token_s,
        "tokens_per_s": None if timing is None else timing.tokens_per_s,
    }
    typer.echo(json.dumps(told))


def _summary(timing: TurnTiming, finish_reason: str | None) -> str:
    usage, rate = timing.usage, timing.tokens_per_s
    cached = "?" if usage.cached_tokens is None else str(usage.cached_tokens)
    parts = [
        f"TTFT {timing.first_token_s * 1e3:.1f} ms",
        f"{cached} cached + {usage.new_prompt_tokens} new prompt tokens",
        f"{usage.completion_tokens} output tokens",
    ]
    if rate is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if finish_reason == "length":
        parts.append("cut off")
    return " · ".join(parts)
