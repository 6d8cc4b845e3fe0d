"""What rank 0 tells the others, and what they answer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from cache.tiers import PoolPages
from engine.parallel.wire import Wire

LAUNCH, SAVE, SPILL, LOAD, DROP, CLONE, CLOSE = range(7)
"""Commands: (LAUNCH, batch), (SAVE or LOAD, key, pages), (SPILL, key, key), (DROP, key), (CLONE, pages, pages),
(CLOSE,)."""

READY, DONE, FAILED = range(3)
"""Answers: (READY, facts), (DONE, number of the command, error or None), (FAILED, reason)."""


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
