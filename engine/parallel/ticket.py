"""What a rank is told so that it finds the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`start_s` bounds the start of processes, and after it the loading of the model; `join_s` the ranks finding each
    other once all have come, `step_s` any wait of one for another within a step, `stop_s` an orderly end."""

    start_s: float = 900.0
    join_s: float = 60.0
    step_s: float = 60.0
    stop_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A rank's place among `size`. Rank 0 listens at `host` for commands' connections and keeps the store by which
    the ranks' collectives find each other; `token` proves that who connects was given a ticket."""

    rank: int
    size: int
    host: str
    command_port: int
    store_port: int
    token: bytes
    timeouts: Timeouts
