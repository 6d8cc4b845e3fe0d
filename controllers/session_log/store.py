"""SessionStore: the durable session log from which ownership and histories are rebuilt.

One log may serve several clusters, for example during an upgrade in which a new cluster starts before the old one ends.
Each session has one writer: the cluster that opened or claimed it last. A log in a file has one writer for them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controllers.errors import ControllerError
from controllers.records import LedgerEntry, SessionRecord, TurnNote, TurnRecord


@dataclass(frozen=True, slots=True)
class LogChanges:
    """What other clusters on the same session log have done. `taken`: sessions that they took from this cluster, and
    the epochs at which they did. `claimable`: some of the sessions that are this cluster's or whose cluster is gone;
    each call returns others."""

    taken: tuple[tuple[str, int], ...] = ()
    claimable: tuple[LedgerEntry, ...] = ()


class SessionStore(Protocol):
    """Sessions and their committed turns. Every method raises StoreError if it cannot read or write the log. Methods
    that change or load a session raise SessionTakenOver if another cluster has claimed it.

    Each change is atomic (each of several turns by itself). Once the method has returned, it survives the death of the
    process.
    """

    def open(self, record: SessionRecord, notes: Sequence[TurnNote] = ()) -> SessionRecord:
        """Adds a session without turns, at its epoch or, if that is higher, just above the highest of any closed
        session. A history is a copy of another log's, as are the `notes`, which have negative numbers. Returns the
        session as it was added. A log behind a network also returns a session that an earlier call with the same
        `open_key` added, since the answer to that call may have been lost.

        Raises SessionExists.
        """

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> LedgerEntry:
        """Adds a session that begins with the first `length` tokens of its parent. Either may change and end without
        the other. The tokens that they share are stored once.

        Returns the session as it was added, at an epoch as in `open`. Raises SessionNotFound, InvalidFork and
        SessionExists.
        """

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        """Records a new owner. `epoch` must be the stored epoch plus one; repeating an assignment is fine. It is no use
        of the session.

        Raises SessionNotFound and StaleEpoch.
        """

    def append_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        """Appends committed turns, one after the other, and returns the outcome of each. A turn that is refused changes
        nothing. Repeating the last turn of a session is fine. A `start_len` below the history's length is a rewind: in
        the same change the session loses its tokens after that, and the kept answers of turns that are no longer whole
        become empty. Their keys stay.

        Outcomes are None, SessionNotFound and SessionTakenOver; StaleEpoch if the epoch is not the stored one, or if
        the turn is not the next one or starts past the history's end; IdempotencyConflict if a recent turn had the same
        key; and StoreError if the log may or may not hold the turn. Raises StoreError if that is so for all turns.
        """

    def load(self, session_id: str) -> SessionRecord:
        """The session with its whole history. Raises SessionNotFound."""

    def notes(self, session_id: str) -> Sequence[TurnNote]:
        """The notes of the turns that make up the session's history, in their order. Raises SessionNotFound."""

    def notes_after(self, session_id: str, turn_index: int | None, room: int) -> Sequence[TurnNote]:
        """Those of turns after `turn_index` (None: from the first) that have up to `room` bytes in the log, but at
        least one. It costs no more if the session has more notes. Raises SessionNotFound."""

    def forget_note(self, session_id: str, turn_index: int) -> None:
        """Deletes what the turn's note says, and its kept answer. The note's checkpoint and the answer's key stay. A
        turn without a note is fine. Raises SessionNotFound."""

    def find(self, session_id: str) -> LedgerEntry:
        """The session as the log has it, whichever cluster is its writer. Raises SessionNotFound."""

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Makes this cluster the session's writer and the replica its owner, at the next epoch. The former owner is
        then stale.

        A session of this cluster stays as it is. Returns the session as it is then. Raises SessionNotFound.
        """

    def changes(self) -> LogChanges:
        """What other clusters did since the last call, and perhaps the one before. Also tells them that this cluster
        lives. To be called every 15 s or so."""

    def load_all_entries(self) -> Iterable[LedgerEntry]:
        """Every session of this cluster, without histories. Read it to the end before any other call."""

    def touch(self, session_id: str, last_used_s: float) -> None:
        """Records when the session was last used, in Unix seconds. Raises SessionNotFound."""

    def close(self, session_id: str) -> bool:
        """Deletes the session and its turns. Its epoch is remembered, see `open`. False if it was unknown."""

    def close_after(self, session_id: str, turn_key: str) -> None:
        """Records that the session is to be closed when the turn with this idempotency key has ended. Raises
        SessionNotFound."""

    def purge(self) -> None:
        """Removes deleted data from the files that the log itself writes. To be called regularly: it does nothing if
        nothing was deleted."""

    def deployment(self) -> str | None:
        """The text that `set_deployment` last stored; None if there is none."""

    def set_deployment(self, text: str) -> None:
        """Stores which deployment's settings apply to this cluster (controllers/deployments.py)."""

    def link_secret(self, new: bytes) -> bytes:
        """The secret that the processes of this cluster share. If the log has none, it becomes `new`."""

    def disconnect(self) -> None:
        """Releases the log. The store is unusable afterwards."""
