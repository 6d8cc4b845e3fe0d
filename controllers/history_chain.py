"""How a session's history is kept: its tokens, and a fingerprint by which the engine recognizes the history's KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class HistoryChain(Protocol):
    """A history with four bytes per token, and its running fingerprint, which only the engine reads."""

    def __len__(self) -> int:
        """The number of tokens."""

    @property
    def tokens(self) -> Sequence[int]:
        """The history, for reading only. It changes when the chain is extended or cut."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. O(their number)."""

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens."""

    def prefix(self, length: int) -> HistoryChain:
        """A new history that consists of the first `length` tokens of this one."""


ChainMaker = Callable[[str, str], HistoryChain]
"""Makes an empty history for a tenant and an adapter of the model ("" is none)."""
