"""A session and its turns, for tests of the session log."""

from __future__ import annotations

from dataclasses import replace

from controllers.records import SessionRecord, TurnRecord
from controllers.store import SessionStore
from controllers.tokens import decode_tokens, encode_tokens

SESSION = SessionRecord("s", "", 1, "a", timeout_s=30.0, capacity_tokens=99, created_s=5.0, open_key="o")


def turn_of(index: int, start_len: int, tokens: list[int], **changes: object) -> TurnRecord:
    """A turn of SESSION."""
    record = TurnRecord("s", 1, index, start_len, encode_tokens(tokens), len(tokens) // 2)
    return replace(record, **changes)


def history_of(store: SessionStore, session_id: str = "s") -> list[int]:
    return decode_tokens(store.load(session_id).history)
