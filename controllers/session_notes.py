"""SessionNotes: reads what a session's turns said back from the session log. Pure logic."""

from __future__ import annotations

from controllers.ownership import OwnershipLedger
from controllers.records import TurnNote
from controllers.session_claims import SessionClaims
from controllers.session_keys import session_key

PAGE_BYTES = 2**20
"""The most bytes of notes in one answer: the controller does nothing else while it makes one."""


class SessionNotes:
    """Reads and deletes notes of sessions that the ledger has. Every method raises SessionNotFound and StoreError."""

    def __init__(self, ledger: OwnershipLedger, claims: SessionClaims) -> None:
        self._ledger = ledger
        self._claims = claims

    def page(self, session_id: str, tenant: str, after: int | None = None) -> list[TurnNote]:
        """A page of the notes of the turns that make up the session's history, in their order. It has the notes after
        the turn `after` (None: from the first) that fit into PAGE_BYTES, but at least one. Empty: there are no more."""
        key = session_key(tenant, session_id)
        self._ledger.get(key)
        with self._claims.changing(key, "notes") as store:
            return list(store.notes_after(key, after, PAGE_BYTES))

    def forget(self, session_id: str, tenant: str, turn_index: int) -> None:
        """Deletes what a turn's note says, and its kept answer. A turn without a note is fine."""
        key = session_key(tenant, session_id)
        self._ledger.get(key)
        with self._claims.changing(key, "notes") as store:
            store.forget_note(key, turn_index)
