"""A session's history as `kedge sessions show` prints it: turn by turn, each with its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving.cli.commands.printable import printable
from serving.cli.commands.wording import counted, duration, size

OTHER_COLUMNS = 38
"""Width in cells of the table's other columns, without the text."""
MIN_TEXT_WIDTH = 20


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """`number` is None for a turn of the session that this one was forked from. `tokens` are those that the turn added.
    `end` is its checkpoint: how many tokens there were when it had ended."""

    number: int | None
    messages: Sequence[Mapping[str, Any]]
    tokens: int
    end: int


def print_session(console: Console, found: Mapping[str, Any], *, full: bool) -> None:
    for name, value in _about(found):
        console.print(f"{name:<8} {value}", markup=False, highlight=False, soft_wrap=True)
    turns = list(turns_of(found["messages"], found["checkpoints"]))
    if not turns:
        console.print("nothing was said in it yet")
        return
    console.print()
    console.print(_table(turns, None if full else max(MIN_TEXT_WIDTH, console.width - OTHER_COLUMNS)))


def turns_of(
    messages: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]]
) -> Iterator[ShownTurn]:
    """The turns. A turn whose history was sent again differently, or taken back, has no messages of its own."""
    begun = end = 0
    for checkpoint in checkpoints:
        count, tokens = int(checkpoint["messages"]), int(checkpoint["tokens"])
        yield ShownTurn(checkpoint["turn"], messages[begun:count], tokens - end, tokens)
        begun, end = max(begun, count), tokens


def said(message: Mapping[str, Any]) -> str:
    """The words of a message, and whatever else it contains."""
    content, parts = message.get("content"), []
    if isinstance(content, str):
        parts.append(content)
    elif isinstance(content, list):
        parts += [
            str(part.get("text") or f"[{part.get('type')}]") for part in content if isinstance(part, dict)
        ]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"[calls {function.get('name')}({shown})]")
    return " ".join(parts)


def _about(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "session", str(found["session_id"])
    if found.get("tenant"):
        yield "tenant", str(found["tenant"])
    yield "owner", f"{found['replica_id'] or 'none'}, epoch {found['epoch']}"
    yield "history", f"{found['tokens']:,} tokens in {counted(int(found['turns']), 'turn')}"
    yield "KV", size(int(found["size_bytes"]))
    yield "idle", "in turn" if found["in_turn"] else duration(float(found["idle_s"]))


def _table(turns: Sequence[ShownTurn], text_width: int | None) -> Table:
    """`text_width`: the most cells that a message may take; None: no limit."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("turn", justify="right")
    table.add_column("role")
    table.add_column("text", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column("checkpoint", justify="right")
    for turn in turns:
        _add_turn(table, turn, text_width)
    return table


def _add_turn(table: Table, turn: ShownTurn, text_width: int | None) -> None:
    """The number is in the row of its first message, the tokens in the row of its last."""
    number = "-" if turn.number is None else str(turn.number)
    figures = (f"{turn.tokens:+,}", f"{turn.end:,}")
    if not turn.messages:
        # A prompt of token ids has no readable text.
        table.add_row(number, "", Text("no words", style="dim"), *figures)
    for index, message in enumerate(turn.messages):
        words = Text(printable(said(message)))
        if text_width is not None:
            words = Text(" ".join(words.plain.split()))
            words.truncate(text_width, overflow="ellipsis")
        is_last = index == len(turn.messages) - 1
        table.add_row(
            "" if index else number,
            str(message.get("role", "")),
            words,
            *(figures if is_last else ("", "")),
        )
