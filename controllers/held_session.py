"""A session as its owner holds it, and the checks that a new turn must pass. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from controllers.errors import (
    CapacityExceeded,
    IdempotencyConflict,
    InvalidRewind,
    SessionClosing,
    SessionIsTree,
    ToolsDiffer,
    TurnInFlight,
)
from controllers.history_chain import HistoryChain
from controllers.records import TREE_KEY, Checkpoint, StoredResult
from controllers.session_keys import named
from controllers.session_log.kept_answers import lost
from controllers.turns import Fork, Replay, Turn


@dataclass(slots=True, eq=False)
class HeldSession:
    """`chain` is made for `adapter`, that of the last turn."""

    epoch: int
    tenant: str
    chain: HistoryChain
    turns: int
    timeout_s: float
    capacity_tokens: int | None
    results: OrderedDict[str, StoredResult]
    idle_since_s: float
    tools: str | None
    adapter: str = ""
    open_key: str | None = None
    turn: Turn | Fork | None = None
    closing: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)
    whole: bool = False
    awaited: str | None = None
    """If the session was already closing when it was adopted: the key of the turn that may still come."""
    committed_s: float | None = None
    """When the last turn was committed here. None: none was since the session was adopted."""
    undone: str | None = None
    """The digest of the last turn that was begun, if it was aborted and no turn has been committed since."""


def check_free(session_id: str, session: HeldSession, turn_key: str | None = None) -> None:
    if session.closing and (turn_key is None or turn_key != session.awaited):
        raise SessionClosing(f"{named(session_id)} is closing")
    if session.turn is not None:
        what = "is being forked" if isinstance(session.turn, Fork) else "has a turn in flight"
        raise TurnInFlight(f"{named(session_id)} {what}")


def check_line(session_id: str, session: HeldSession) -> None:
    if session.open_key is not None and session.open_key.startswith(TREE_KEY):
        raise SessionIsTree(
            f"{named(session_id)} is a tree of requests of /generate; a session of turns is opened with streaming"
        )


def replay(stored: StoredResult, digest: str | None) -> Replay:
    if digest is not None and stored.digest is not None and digest != stored.digest:
        raise IdempotencyConflict(f"key {stored.idempotency_key!r} was used for a different request")
    return Replay(stored.turn_index, stored.result)


def forget_cut_answers(session: HeldSession, length: int) -> None:
    """Deletes the answers that the log deletes when the history is cut to `length` tokens."""
    by_turn = {kept.turn_index: kept for kept in session.results.values()}
    ends = {turn: kept.end_len for turn, kept in by_turn.items() if kept.end_len is not None}
    for turn in lost(by_turn, ends, length):
        kept = by_turn[turn]
        session.results[kept.idempotency_key] = replace(kept, result=b"")


def room_tokens_behind(session: HeldSession, history_len: int) -> int | None:
    return None if session.capacity_tokens is None else session.capacity_tokens - history_len


def kept_len(committed_len: int, rewind_to: int | None) -> int:
    history_len = committed_len if rewind_to is None else rewind_to
    if not 0 <= history_len <= committed_len:
        raise InvalidRewind(f"cannot rewind to {history_len}: committed history has {committed_len} tokens")
    return history_len


def tools_error(session_id: str, tools: str | None) -> ToolsDiffer:
    began = "no tools" if tools is None else "others"
    return ToolsDiffer(
        f"tools: {named(session_id)} began with {began}. Its turns name the tools of the first one, or none; "
        "open another session for these."
    )


def capacity_error(session_id: str, capacity_tokens: int | None, needed_tokens: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"{named(session_id)} was opened for {capacity_tokens} tokens; this turn needs {needed_tokens}"
    )
