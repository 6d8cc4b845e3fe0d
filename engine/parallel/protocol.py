"""What ranks tell each other: the ticket that each is started with, commands and answers. Also the failures between
them. None of these can be repaired: the replica must be replaced as a whole."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.tiers import PoolPages
from engine.parallel.wire import Wire
from engine.runner.protocol import RunnerLost

LAUNCH, SAVE, SPILL, LOAD, DROP, CLONE, CLOSE = range(7)
"""Commands: (LAUNCH, batch), (SAVE or LOAD, key, pages), (SPILL, key, key), (DROP, key), (CLONE, pages, pages),
(CLOSE,)."""

READY, DONE, FAILED = range(3)
"""Answers: (READY, facts), (DONE, number of the command, error or None, its errno or None),
(FAILED, reason)."""


class RanksLost(RunnerLost):
    """A rank failed, died, or did not answer in time."""


class RanksNotStarted(RuntimeError):
    """Not every rank started with its share of the model."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`start_s` bounds the start of processes, and then the loading of the model. `join_s` bounds how long the ranks
    take to find each other once all have connected, `step_s` any wait of one rank for another within a step, `stop_s`
    an orderly end."""

    start_s: float = 900.0
    join_s: float = 60.0
    step_s: float = 60.0
    stop_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A rank's place among `size`. Rank 0 listens at `host` for connections that carry commands, and keeps the store
    through which the ranks' collectives find each other. `token` proves that the process that connects was given a
    ticket."""

    rank: int
    size: int
    host: str
    command_port: int
    store_port: int
    token: bytes
    timeouts: Timeouts


def packed(*message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpacked(message: bytes) -> tuple[Any, ...]:
    parts: tuple[Any, ...] = pickle.loads(message)
    return parts


def pages_out(pages: PoolPages) -> Wire:
    return tuple((array.astype(np.int32).tobytes()) for array in (pages.full, pages.window))


def pages_in(wire: Wire) -> PoolPages:
    full, window = (np.frombuffer(part, dtype=np.int32) for part in wire)
    return PoolPages(full, window)
