"""Which replica gets a session: the one with the most free KV, or one that has some of its KV already. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controllers.errors import NoReplica


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take a session, as placement sees it.

    `free_tokens` is KV free at its last heartbeat, `assigned_tokens` what sessions placed since may take.
    """

    replica_id: str
    free_tokens: int
    assigned_tokens: int
    sessions: int

    @property
    def expected_free_tokens(self) -> int:
        return self.free_tokens - self.assigned_tokens


PREFERRED_SHARE = 0.5
"""Of the free KV that another replica has, one with some of a session's KV must have free to get it."""


def choose_replica(candidates: Iterable[Candidate], preferred: str | None = None) -> str:
    """Id of the replica with the most free KV; ties: fewer sessions, then smaller id. Or of the `preferred` one, if it
    has enough. Raises NoReplica."""
    candidates = list(candidates)
    best = min(
        candidates,
        key=lambda c: (-c.expected_free_tokens, c.sessions, c.replica_id),
        default=None,
    )
    if best is None:
        raise NoReplica("no live replica can take the session")
    for candidate in candidates:
        enough = candidate.expected_free_tokens >= PREFERRED_SHARE * best.expected_free_tokens
        if candidate.replica_id == preferred and enough:
            return candidate.replica_id
    return best.replica_id
