"""Whether a session may be opened and a turn be taken: accept, queue or refuse. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from controllers.errors import Overloaded

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Admission(StrEnum):
    ACCEPT = "accept"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Load of a replica: turns running, turns waiting, and how long a turn took of late, in seconds."""

    running: int
    waiting: int
    mean_turn_s: float


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """`max_running` turns run at once, `max_queued` more may wait."""

    max_running: int
    max_queued: int


def admit_session(sessions: int, max_sessions: int, next_expiry_s: float | None = None) -> None:
    """Allows one more session. `next_expiry_s`: seconds until an idle session expires, if one will.

    Raises Overloaded, with the estimate when there will be room.
    """
    if sessions < max_sessions:
        return
    wait_s = MAX_RETRY_AFTER_S if next_expiry_s is None else next_expiry_s
    raise Overloaded(f"{sessions} sessions are open, the limit", retry_after_s=_bounded(wait_s))


def admit_turn(load: TurnLoad, limits: TurnLimits) -> Admission:
    """ACCEPT: there is room to run now. QUEUE: it has to wait. Raises Overloaded when the queue is full."""
    if load.running < limits.max_running and load.waiting == 0:
        return Admission.ACCEPT
    if load.waiting < limits.max_queued:
        return Admission.QUEUE
    raise Overloaded(
        f"{load.waiting} turns are waiting, the limit",
        retry_after_s=estimate_wait_s(load, limits.max_running),
    )


def estimate_wait_s(load: TurnLoad, max_running: int) -> float:
    """Seconds until half of the queue has been served, at least one second and at most a minute."""
    rounds = math.ceil((load.waiting / 2) / max(max_running, 1))
    return _bounded(rounds * load.mean_turn_s)


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
