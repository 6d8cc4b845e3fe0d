"""What rank 0 tells the others, and what they answer."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.tiers import PoolPages
from engine.parallel.wire import Wire
from engine.runner.protocol import Runner

LAUNCH, SAVE, LOAD, DROP, CLONE, CLOSE = range(6)
"""Commands: (LAUNCH, batch), (SAVE or LOAD, key, pages), (DROP, key), (CLONE, pages, pages), (CLOSE,)."""

READY, DONE, FAILED = range(3)
"""Answers: (READY, facts), (DONE, number of the command, error or None), (FAILED, reason)."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What every rank's runner must have alike, since one set of books counts for all."""

    num_pages: int
    page_size: int
    num_window_pages: int
    max_context_len: int
    vocab_size: int

    @classmethod
    def of(cls, runner: Runner) -> PoolFacts:
        return cls(
            runner.num_pages,
            runner.page_size,
            runner.num_window_pages,
            runner.max_context_len,
            runner.vocab_size,
        )


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
