"""Attention over the paged KV pool, behind one small interface.

Legend: N tokens of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One request's share of a step: its last `query_len` of `kv_len` tokens are computed now.

    Token t lives in slot `pages[t // page_size] * page_size + t % page_size`; `contiguous` says that `pages` is
    one ascending run.
    """

    query_len: int
    kv_len: int
    pages: NDArray[np.int32]
    contiguous: bool


class AttentionStep(Protocol):
    """The attention of one step. Called once per layer, in the order of layers."""

    def __call__(self, layer: int, q_NHD: Tensor, kv_N2KD: Tensor) -> Tensor:
        """Writes the new keys and values, then attends causally; gives [N, H * D]."""


class AttentionBackend(Protocol):
    """Owns how the pool is read; made once with the pool."""

    def begin(self, items: Sequence[AttentionItem], slots_N: Tensor) -> AttentionStep:
        """Plans a step. `slots_N` (int64) is where each of the step's tokens is written, items one after
        another."""
