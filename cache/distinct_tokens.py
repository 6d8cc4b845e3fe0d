"""DistinctTokens: the distinct tokens of a sequence that grows and is cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_INITIAL_CAPACITY = 64


class DistinctTokens:
    """Tokens in the order of their first occurrence, with its position. Extending costs the new tokens, and one pass
    over the vocabulary at most; cutting costs a binary search. Takes 8 bytes for each distinct token."""

    __slots__ = ("_count", "_firsts", "_ids", "length")

    def __init__(self) -> None:
        self._ids = np.empty(_INITIAL_CAPACITY, dtype=np.uint32)
        self._firsts = np.empty(_INITIAL_CAPACITY, dtype=np.uint32)
        self._count = 0
        self.length = 0  # of the sequence

    @property
    def ids(self) -> NDArray[np.uint32]:
        """A view, valid until the next change."""
        return self._ids[: self._count]

    def extend(self, tokens: NDArray[np.uint32]) -> None:
        """The sequence's next tokens."""
        if len(tokens) == 0:
            return
        new, places = np.unique(tokens, return_index=True)
        is_known = np.zeros(1 + max(int(new[-1]), int(self.ids.max(initial=0))), dtype=np.bool_)
        is_known[self.ids] = True
        places = np.sort(places[~is_known[new]])
        end = self._count + len(places)
        if end > len(self._ids):
            self._ids, self._firsts = (
                np.resize(old, max(end, 2 * len(old))) for old in (self._ids, self._firsts)
            )
        self._ids[self._count : end] = tokens[places]
        self._firsts[self._count : end] = places + self.length
        self._count = end
        self.length += len(tokens)

    def cut(self, length: int) -> None:
        """Only the first `length` tokens of the sequence stay."""
        if length < self.length:
            self._count = int(np.searchsorted(self._firsts[: self._count], length))
            self.length = length
