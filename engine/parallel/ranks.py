"""The processes that hold one model together (tensor parallel), as the model sees them.

Legend: N tokens, E hidden size, R rows, v one rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """Every rank calls the same methods in the same order with tensors of the same shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, x_NE: Tensor) -> None:
        """Sums the ranks' tensors, in place on each rank."""

    def join(self, x_Rv: Tensor) -> Tensor:
        """The ranks' columns side by side [R, size * v], on each rank."""

    def share_(self, x: Tensor) -> None:
        """Overwrites x with rank 0's value."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' values. Waits for all of them: not for use in a step."""


class OneRank:
    """A RankGroup of one: the whole model in this process."""

    rank = 0
    size = 1

    def sum_(self, x_NE: Tensor) -> None:
        pass

    def join(self, x_Rv: Tensor) -> Tensor:
        return x_Rv

    def share_(self, x: Tensor) -> None:
        pass

    def least(self, value: int) -> int:
        return value
