"""The rules for changes of a session log, whatever it is stored in. Each rule sees the session as the log has it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from controllers.errors import (
    IdempotencyConflict,
    InvalidFork,
    SessionExists,
    SessionNotFound,
    StaleEpoch,
    StoreError,
)
from controllers.records import LedgerEntry, TurnRecord
from controllers.session_keys import named
from controllers.tokens import count_tokens


def not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"no {named(session_id)}", "session_id")


def exists(session_id: str) -> SessionExists:
    return SessionExists(f"{named(session_id)} is open already", "session_id")


def check_shards(found: int, wanted: int, place: str) -> None:
    """Raises StoreError if the log in this place has another number of shards: sessions would be looked for where they
    are not."""
    if found != wanted:
        raise StoreError(
            f"{place} has the session log of controller.shards: {found}, not {wanted}. Set it back, or give "
            "controller.name or controller.state_dir another value, whose sessions begin with that log",
            "controller.shards",
        )


def check_fork(committed_len: int, length: int) -> None:
    """Raises InvalidFork if the parent's history, of `committed_len` tokens, is shorter than `length`."""
    if not 0 <= length <= committed_len:
        raise InvalidFork(f"cannot fork at {length}: committed history has {committed_len} tokens")


def changes_owner(entry: LedgerEntry, replica_id: str, epoch: int) -> bool:
    """Whether the assignment is new; False if it is already recorded. Raises StaleEpoch."""
    if (entry.epoch, entry.replica_id) == (epoch, replica_id):
        return False
    if entry.epoch + 1 != epoch:
        raise StaleEpoch(f"{named(entry.session_id)} is at epoch {entry.epoch}; cannot go to {epoch}")
    return True


def identity(record: TurnRecord) -> list[int | str | None]:
    """What identifies the turn, besides its tokens. It survives a round trip through JSON unchanged."""
    tokens = count_tokens(record.tokens)
    return [record.start_len, tokens, record.input_len, record.idempotency_key, record.digest]


def adds_turn(entry: LedgerEntry, record: TurnRecord, is_last: Callable[[], bool]) -> bool:
    """Whether the turn is new; False if it repeats the last turn in the log. Raises StaleEpoch."""
    if record.epoch != entry.epoch:
        raise StaleEpoch(f"{named(record.session_id)} is at epoch {entry.epoch}, not {record.epoch}")
    if record.turn_index == entry.turns - 1 and is_last():
        return False
    if record.turn_index != entry.turns or not 0 <= record.start_len <= entry.tokens:
        raise StaleEpoch(f"{named(record.session_id)} has gone on to turn {entry.turns}")
    return True


def set_by(record: TurnRecord) -> dict[str, Any]:
    """The session's `tools` and `model` as the turn sets them. A turn that begins the history sets both. A later turn
    sets only `model`, and only if its replica tells it."""
    if record.start_len == 0:
        return {"tools": record.tools, "model": record.model}
    return {} if record.model is None else {"model": record.model}


def check_key(record: TurnRecord, kept_keys: Collection[str]) -> None:
    """Raises IdempotencyConflict if another turn used the record's key."""
    if record.idempotency_key in kept_keys:
        raise IdempotencyConflict(f"key {record.idempotency_key!r} was used by another turn")
