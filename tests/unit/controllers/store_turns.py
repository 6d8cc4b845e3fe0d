"""A session and its turns, for tests of the session log and of the controller's logic."""

from __future__ import annotations

from dataclasses import replace

from controllers.cluster import Cluster
from controllers.commit_groups import Outcome
from controllers.records import SessionRecord, TurnRecord
from controllers.session_log.store import SessionStore
from controllers.tokens import encode_tokens, unpack_tokens

SESSION = SessionRecord("s", "", 1, "a", timeout_s=30.0, capacity_tokens=99, created_s=5.0, open_key="o")

OTHER = replace(SESSION, session_id="other", open_key="p")


def turn_of(index: int, start_len: int, tokens: list[int], **changes: object) -> TurnRecord:
    """A turn of SESSION."""
    record = TurnRecord("s", 1, index, start_len, encode_tokens(tokens), len(tokens) // 2)
    return replace(record, **changes)


def of_other(record: TurnRecord) -> TurnRecord:
    """The same turn of OTHER."""
    return replace(record, session_id="other")


def history_of(store: SessionStore, session_id: str = "s") -> list[int]:
    return unpack_tokens(store.load(session_id).history).tolist()


def append_turn(store: SessionStore, record: TurnRecord) -> None:
    """Appends one turn alone. Raises the log's refusal."""
    (refusal,) = store.append_turns([record])
    _raise(refusal)


def commit_turn(cluster: Cluster, record: TurnRecord) -> None:
    """Commits one turn alone. Raises the controller's refusal."""
    (refusal,) = cluster.commits.commit([record])
    _raise(refusal)


def _raise(refusal: Outcome) -> None:
    if refusal is not None:
        raise refusal
