"""The cluster as the protocols see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from serving.wire.turns import (
    ChatPrompt,
    ForkedSession,
    ModelInfo,
    MovedSession,
    SessionInfo,
    TextPrompt,
    TokenizedPrompt,
    TurnCall,
    TurnEvent,
    TurnTranscript,
)


class WatchedItem(msgspec.Struct, frozen=True):
    """An item for a watcher of the cluster: a "state" or an "event" (serving/watch/cluster_state.py), as JSON."""

    name: str
    data: bytes


class TurnService(Protocol):
    """What protocols ask of the cluster. Implemented in serving/front/cluster_client.py.

    Every method raises ServiceError for errors that the client must get.
    """

    @property
    def model(self) -> ModelInfo: ...

    async def learn_model(self) -> None:
        """Asks the replicas what they serve, which `model` then is."""

    def run(self, call: TurnCall) -> AbstractAsyncContextManager[AsyncIterator[TurnEvent]]:
        """Streams a turn's events. Each has at least one token or the end, except the first event of a call that
        `tells_accepted`. Leaving the context early (client disconnect) aborts the turn.

        Entering the context waits for the first event. A refusal raises ServiceError there. Later errors arrive as an
        event."""

    async def open_session(
        self,
        session_id: str | None,
        *,
        timeout_s: float | None,
        capacity_tokens: int | None,
        tenant: str,
        tree: bool = False,
    ) -> str:
        """Registers and places a session; returns its id. A `tree` takes no turns, only forks. A duplicate id raises
        (400, "session_exists")."""

    async def is_tree(self, session_id: str, *, tenant: str) -> bool:
        """Whether the session was opened as a tree. Raises (404) for an unknown one."""

    async def fork_session(
        self,
        session_id: str,
        new_session_id: str | None,
        *,
        length: int | None,
        timeout_s: float | None,
        tenant: str,
    ) -> ForkedSession:
        """Starts a session from the first `length` tokens (None: all) of another, and shares their KV. Raises (404) for
        an unknown session, (409) while it has a turn, (400) for a length past its history or an id that is in use."""

    async def rewind_session(self, session_id: str, length: int, *, tenant: str) -> None:
        """Keeps the first `length` committed tokens of the session. This counts as a turn. Raises (404) for an unknown
        session, (409) while it has a turn, (400) for a length past its history."""

    async def move_session(self, session_id: str, to: str | None, *, tenant: str) -> MovedSession:
        """Moves the session, between two turns, to the replica `to` (None: to the best of the others). Its history goes
        along, its KV does not. Raises (404) for an unknown session, (400, "invalid_move") for an unknown replica, (409)
        while it has a turn, and (503, "no_replica") if that replica, or every other one, takes no sessions."""

    async def keep_note(
        self, session_id: str, note: bytes, *, expected_turn: int | None, tenant: str
    ) -> None:
        """Commits an empty turn with this note. `expected_turn` is the number that it must have (None: any). Raises
        (404) for an unknown session, (409, "turn_in_flight") while it has a turn, and (409, "turn_differs")."""

    async def close_session(self, session_id: str, *, tenant: str) -> bool:
        """Closes the session now, or when its turn in flight ends. False if the session was unknown."""

    async def abort(self, request_id: str | None, *, all_requests: bool = False, tenant: str) -> None:
        """Aborts one request of the tenant (unknown ids are ignored) or all of them, on every replica."""

    async def tokenize(self, prompt: ChatPrompt | TextPrompt, *, with_token_strs: bool) -> TokenizedPrompt:
        """The tokens of a prompt outside a session."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the model's tokens. Incomplete characters become U+FFFD."""

    async def flush(self) -> bool:
        """Drops cached prefixes on every replica; False if any replica was busy."""

    async def drain_replica(self, replica_id: str) -> None:
        """Makes the replica hand its sessions over, finish its turns and end. Serve then replaces it. Returns at once.

        Raises (404, "replica_not_found"), and (503, "no_replica") if no other replica could take its sessions."""

    async def sessions(self, *, tenant: str | None, after: str | None, limit: int) -> list[SessionInfo]:
        """The first `limit` sessions of the tenant (None: of all tenants) after the session key `after`, ordered by
        tenant and id. No session need have that key."""

    async def session(self, session_id: str, *, tenant: str) -> SessionInfo | None:
        """The tenant's session of this id; None if there is none."""

    async def transcript(self, session_id: str, *, tenant: str) -> list[TurnTranscript]:
        """The turns that make up the session's history, oldest first. Raises (404, "session_not_found")."""

    async def forget_note(self, session_id: str, turn_index: int, *, tenant: str) -> None:
        """Empties the turn's note. Raises (404) for an unknown session. A turn without a note is no error."""

    async def server_info(self) -> dict[str, Any]:
        """Settings and per-replica figures, JSON ready."""

    async def audit(self) -> dict[str, Any]:
        """The audit of every KV page of every replica, JSON ready (serving/watch/audit_reply.py)."""

    def watch(
        self, interval_s: float, limit: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Sequence[WatchedItem]]]:
        """Streams the cluster's state every `interval_s`, with at most `limit` sessions, and its events, the last ones
        first. Waiting for the next items may be cancelled. Raises (503, "too_many_watchers") on entry, and
        (503, "watcher_too_slow") if too many items were not read."""

    async def metrics_text(self) -> str:
        """The metrics of every replica, the controller and every ingress, in Prometheus' format."""

    async def healthy(self) -> bool: ...
