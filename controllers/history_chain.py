"""How a session's history is kept: its tokens, and a fingerprint of them by which an engine knows which KV is of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class HistoryChain(Protocol):
    """A history, four bytes a token, and its running fingerprint, into which only the engine looks."""

    def __len__(self) -> int:
        """Tokens."""

    @property
    def tokens(self) -> Sequence[int]:
        """The history, to be read. It grows and is cut with this."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. O(their number)."""

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens."""

    def prefix(self, length: int) -> HistoryChain:
        """Another history, which begins with the first `length` tokens of this one."""


ChainMaker = Callable[[str], HistoryChain]
"""A tenant's history that has no token yet."""
