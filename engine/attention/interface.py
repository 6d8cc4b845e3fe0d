"""Attention over the paged KV pool, behind one small interface.

Legend: P pools (full attention, then sliding windows if the model has them), N tokens of the step, H query heads, J
vectors of a head (kv_pool.py), K key/value heads, D head size, V size of a value (D, or that of a latent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runner.kv_pool import PagedKV


class AttentionUnavailable(RuntimeError):
    """The backend `name` cannot run here; `why` is a clause that says what is missing."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"attention {name!r} cannot run: {why}")
        self.why = why


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One request's share of a step: the last `query_len` of its `kv_len` tokens are computed now.

    Token t lies in slot `pages[t // page_size] * page_size + t % page_size`; `contiguous` says that `pages` is one
    ascending run. `window_pages` is the same for layers in the pool of sliding windows, -1 where pages are gone.
    """

    query_len: int
    kv_len: int
    pages: NDArray[np.int32]
    contiguous: bool
    window_pages: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Queries:
    """A model's queries: how many of its heads share a key head, and their dtype."""

    group: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class LayerTraits:
    """How one layer attends.

    `scale` multiplies the scores; `softcap` c then bends them to c * tanh(score / c). With `window` W the query at
    position p sees keys at p - W + 1 .. p. `sinks_H` has one logit per head that takes its share of the softmax and
    adds nothing to the output.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def plain_scores(self) -> bool:
        return self.softcap is None and self.sinks_H is None


@dataclass(frozen=True, slots=True)
class ItemLens:
    """An item's new tokens, and all of its tokens including them."""

    queries: int
    keys: int


class AttentionStep(Protocol):
    """The attention of one step. Called once per layer, in the order of layers."""

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        """Writes the new keys and values to the layer's pool, then attends causally; returns [N, H * V].

        Keys outside the window are not read: their pages may be gone and hold anything.
        """


@dataclass(frozen=True, slots=True, eq=False)
class KVTarget:
    """Where one layer's new keys and values go: row n to slot `slots_N[n]` of the pool's layer `place`, or nowhere if
    that is negative."""

    paged: PagedKV
    place: int
    slots_N: Tensor


@runtime_checkable
class OpenStep(AttentionStep, Protocol):
    """An AttentionStep whose writing can be done by another kernel on its way."""

    def target(self, layer: int) -> KVTarget: ...

    def attend(self, layer: int, q_NHD: Tensor, traits: LayerTraits) -> Tensor:
        """A call without its first half: the new keys and values are already in the layer's pool."""


class AttentionBackend(Protocol):
    """Knows how to read the pools; made once for them."""

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> AttentionStep:
        """Plans a step. `slots_PN` (int64) is where each of the step's tokens is written in each pool, items one
        after another."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTables:
    """A step's items as tensors on the device, which kernels read at addresses that a CUDA graph may keep.

    Item b's queries are rows query_starts[b] .. query_starts[b + 1] - 1, the last of its kv_lens[b] tokens. Its token t
    lies in slot `pages[b, t // page_size] * page_size + t % page_size` of each pool; the entry is -1 where a page has
    left the window or never was. Row n is written to `slots_PN[p][n]` of pool p, or nowhere if that is -1. Padding is
    items without queries at the end (kv_len 0), and rows past the last item, whose output is not read. The two lengths
    are upper bounds known on the host. `lens` are the items' own lengths, where the host knows them: not in a step that
    is captured for other contents.
    """

    query_starts_B1: Tensor
    """int32 [B + 1]"""
    kv_lens_B: Tensor
    """int32 [B]"""
    pages_PBM: tuple[Tensor, ...]
    """By pool, int32 [B, M]; rows may be strided"""
    slots_PN: tuple[Tensor, ...]
    """By pool, int64 [N]"""
    max_query_len: int
    max_kv_len: int
    lens: tuple[ItemLens, ...] | None = None


class TableAttention(Protocol):
    """Attention that reads its plan on the device. Knows how to read the pools; made once for them."""

    def captures(self, max_query_len: int) -> bool:
        """Whether a step's launches depend only on the tables' shapes, so that a CUDA graph of them works for other
        contents."""

    def plan(self, tables: AttentionTables) -> AttentionStep:
        """The step reads the tables when its first layer is called: they may be filled after this call, and again for
        each pass over the layers."""
