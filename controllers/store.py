"""SessionStore: the durable session log that ownership and histories are rebuilt from. Single writer."""

from __future__ import annotations

from typing import Protocol

from controllers.records import LedgerEntry, SessionRecord, TurnRecord


class SessionStore(Protocol):
    """Sessions and their committed turns. Every method raises StoreError if it cannot read or write the log.

    Each change is atomic and, once the method has returned, survives the death of the process.
    """

    def open(self, record: SessionRecord) -> None:
        """Adds a session without history. Raises SessionExists."""

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> SessionRecord:
        """Adds a session that begins with the first `length` tokens of its parent, and shares nothing with it.

        Gives the record with that history. Raises SessionNotFound, InvalidFork and SessionExists.
        """

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        """Records a new owner. `epoch` must be the stored epoch plus one; repeating an assignment is fine.

        Raises SessionNotFound and StaleEpoch.
        """

    def append_turn(self, record: TurnRecord) -> None:
        """Appends a committed turn; repeating the last one is fine. `start_len` below the length is a rewind.

        Raises SessionNotFound; StaleEpoch if the epoch is not the stored one, the turn is not the next one or
        starts past the history's end; IdempotencyConflict if a recent turn had the same key.
        """

    def load(self, session_id: str) -> SessionRecord:
        """The session with its whole history. Raises SessionNotFound."""

    def load_all_entries(self) -> list[LedgerEntry]:
        """Every session, without histories."""

    def epoch_floor(self) -> int:
        """The highest epoch that any closed session had; 0 if there was none."""

    def touch(self, session_id: str, last_used_s: float) -> None:
        """Records when the session was last used, in Unix seconds. Raises SessionNotFound."""

    def close(self, session_id: str) -> bool:
        """Deletes the session and its turns; its epoch stays in `epoch_floor`. False if it was unknown."""

    def deployment(self) -> str | None:
        """What `set_deployment` was given last; None if nothing was."""

    def set_deployment(self, text: str) -> None:
        """Keeps which deployment's settings count (controllers/deployments.py)."""

    def disconnect(self) -> None:
        """Releases the log. The store is unusable afterwards."""
