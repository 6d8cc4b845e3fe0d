"""Which sessions are past their idle timeout, and which idle sessions give their KV up first. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controllers.records import LedgerEntry


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A candidate for demotion: KV it holds, in bytes, and when it was last used, in seconds."""

    session_id: str
    size_bytes: int
    last_used_s: float


def expires_at_s(entry: LedgerEntry, default_timeout_s: float) -> float:
    """When the session's idle timeout ends, if nobody uses it. Ignores `in_turn`."""
    timeout_s = default_timeout_s if entry.timeout_s is None else entry.timeout_s
    return entry.last_used_s + timeout_s


def demotion_order(sessions: Iterable[IdleSession]) -> list[IdleSession]:
    """Sessions that hold KV, least recently used first; of equally old ones the larger first, then by id."""
    holding = (session for session in sessions if session.size_bytes > 0)
    return sorted(holding, key=lambda s: (s.last_used_s, -s.size_bytes, s.session_id))


def choose_demotions(sessions: Iterable[IdleSession], need_bytes: int) -> list[str]:
    """The first sessions in demotion order that together hold `need_bytes`; all of them if they hold less."""
    chosen: list[str] = []
    freed_bytes = 0
    for session in demotion_order(sessions):
        if freed_bytes >= need_bytes:
            break
        chosen.append(session.session_id)
        freed_bytes += session.size_bytes
    return chosen
