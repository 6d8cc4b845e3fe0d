"""What goes along with a session's history, so that an engine knows at a glance which KV is of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class HistoryChain(Protocol):
    """A running fingerprint of a history. Whoever keeps the history keeps it in step; only the engine looks into it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The history has grown by `tokens`."""

    def cut(self, length: int) -> None:
        """The history keeps its first `length` tokens."""

    def prefix(self, length: int) -> HistoryChain:
        """That of another history, which begins with the first `length` tokens of this one."""


ChainMaker = Callable[[str], HistoryChain]
"""The chain of a tenant's history that has no token yet."""
