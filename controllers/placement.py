"""Placement: a session goes to the replica with the most free KV, or to one that already has some of its KV. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controllers.errors import NoReplica


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take a session, as placement sees it.

    `free_tokens` is the free KV at its last heartbeat. `assigned_tokens` is the KV that sessions placed there since may
    take.
    """

    replica_id: str
    free_tokens: int
    assigned_tokens: int
    sessions: int

    @property
    def expected_free_tokens(self) -> int:
        return self.free_tokens - self.assigned_tokens


PREFERRED_SHARE = 0.5
"""A preferred replica gets the session if its free KV is at least this share of the best replica's."""


def choose_replica(candidates: Iterable[Candidate], preferred: str | None = None) -> str:
    """The id of the `preferred` replica if it has enough free KV (PREFERRED_SHARE), else of the replica with the most.
    Ties go to the replica with fewer sessions, then to the smaller id. Raises NoReplica."""
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
