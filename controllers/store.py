"""SessionStore: the durable session log that ownership and histories are rebuilt from.

One log may serve several clusters, as during an upgrade that starts the next before the last one ends. Each session has
one writer, the cluster that opened or claimed it last. A log in a file has one writer for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controllers.errors import ControllerError
from controllers.records import LedgerEntry, SessionRecord, TurnNote, TurnRecord


@dataclass(frozen=True, slots=True)
class LogChanges:
    """What other clusters on the same session log have done. `taken`: sessions that they took from this one, and the
    epochs at which they did. `abandoned`: some of those sessions whose cluster is gone, with each call others."""

    taken: tuple[tuple[str, int], ...] = ()
    abandoned: tuple[LedgerEntry, ...] = ()


class SessionStore(Protocol):
    """Sessions and their committed turns. Every method raises StoreError if it cannot read or write the log, and all
    that change or load a session SessionTakenOver if another cluster has claimed it.

    Each change is atomic (of several turns each by itself) and, once the method has returned, survives the death of the
    process.
    """

    def open(self, record: SessionRecord) -> SessionRecord:
        """Adds a session without history, at its epoch or above `epoch_floor`. Gives it as it was added.

        Raises SessionExists.
        """

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> LedgerEntry:
        """Adds a session that begins with the first `length` tokens of its parent. Either may change and end without
        the other; what they have in common is stored once.

        Gives it as it was added, at an epoch like `open`. Raises SessionNotFound, InvalidFork and SessionExists.
        """

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        """Records a new owner. `epoch` must be the stored epoch plus one; repeating an assignment is fine.

        Raises SessionNotFound and StaleEpoch.
        """

    def append_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        """Appends committed turns, as if one came after the other, and gives the outcome of each; one that is refused
        changes nothing. Repeating the last turn of a session is fine. `start_len` below the length is a rewind.

        Outcomes are SessionNotFound and SessionTakenOver; StaleEpoch if the epoch is not the stored one, the turn is
        not the next one or starts past the history's end; IdempotencyConflict if a recent turn had the same key; and
        StoreError where nobody knows whether the log has it. Raises StoreError where nobody knows that of any.
        """

    def load(self, session_id: str) -> SessionRecord:
        """The session with its whole history. Raises SessionNotFound."""

    def notes(self, session_id: str) -> Sequence[TurnNote]:
        """Of the turns that the session's history is of, in their order. Raises SessionNotFound."""

    def forget_note(self, session_id: str, turn_index: int) -> None:
        """Deletes what the turn's note says; its checkpoint stays. A turn that has none is fine. Raises
        SessionNotFound."""

    def find(self, session_id: str) -> LedgerEntry:
        """The session as the log has it, whoever its writer is. Raises SessionNotFound."""

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Makes this cluster the session's writer and the replica its owner, at the next epoch: whoever was is stale.

        A session of this cluster stays as it is. Gives it as it is then. Raises SessionNotFound.
        """

    def changes(self) -> LogChanges:
        """What other clusters did; tells them that this one lives. To be called every few seconds."""

    def load_all_entries(self) -> Iterable[LedgerEntry]:
        """Every session of this cluster, without histories, as they are read: to the end, before any other call."""

    def epoch_floor(self) -> int:
        """The highest epoch that any closed session had; 0 if there was none."""

    def touch(self, session_id: str, last_used_s: float) -> None:
        """Records when the session was last used, in Unix seconds. Raises SessionNotFound."""

    def close(self, session_id: str) -> bool:
        """Deletes the session and its turns; its epoch stays in `epoch_floor`. False if it was unknown."""

    def close_after(self, session_id: str, turn_key: str) -> None:
        """Records that the session is to be closed when the turn of that idempotency key has ended. Raises
        SessionNotFound."""

    def purge(self) -> None:
        """Leaves nothing of what was deleted before in the files that the log itself writes. To be called again and
        again: it does nothing where nothing was deleted."""

    def deployment(self) -> str | None:
        """What `set_deployment` was given last; None if nothing was."""

    def set_deployment(self, text: str) -> None:
        """Keeps which deployment's settings count for this cluster (controllers/deployments.py)."""

    def disconnect(self) -> None:
        """Releases the log. The store is unusable afterwards."""
