"""Which replica gets a session: the one with the most free KV. Pure."""

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


def choose_replica(candidates: Iterable[Candidate]) -> str:
    """Id of the replica with the most free KV; ties: fewer sessions, then smaller id. Raises NoReplica."""
    best = min(
        candidates,
        key=lambda c: (-c.expected_free_tokens, c.sessions, c.replica_id),
        default=None,
    )
    if best is None:
        raise NoReplica("no live replica can take the session")
    return best.replica_id
