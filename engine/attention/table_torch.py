"""Attention over tables with torch's own operators: the reference on a GPU, and for tests of code that makes tables.

Copies its plan back to the host at each step, so it neither runs ahead nor is captured.

Legend: P pools, N tokens of the step, H query heads, K key/value heads, D head size, B items, M pages of the longest.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.interface import (
    AttentionItem,
    AttentionStep,
    AttentionTables,
    AttentionUnavailable,
    LayerTraits,
)
from engine.attention.torch_backend import TorchAttention
from engine.runner.kv_pool import FP8, KVPool


class TorchTables:
    """A TableAttention. Raises AttentionUnavailable for pools in fp8, which torch's operators cannot multiply."""

    def __init__(self, pool: KVPool) -> None:
        if pool.full.kv_LJKSD.dtype == FP8:
            raise AttentionUnavailable("torch", "it has no fp8 KV; triton has")
        self._pool = pool
        self._items = TorchAttention(pool)

    def captures(self, max_query_len: int) -> bool:  # noqa: ARG002
        return False

    def plan(self, tables: AttentionTables) -> AttentionStep:
        return _TableStep(self._pool, self._items, tables)


class _TableStep:
    """An AttentionStep over the items, without the tables' padding. The tables are read at the first layer of each
    pass."""

    def __init__(self, pool: KVPool, backend: TorchAttention, tables: AttentionTables) -> None:
        self._pool = pool
        self._backend = backend
        self._tables = tables
        self._windowed = [paged is pool.window for paged, _ in pool.places]
        self._last_layer = len(pool.places)

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        if layer <= self._last_layer:
            self._read_tables()
        self._last_layer = layer
        row = int(self._windowed[layer])
        written_kv_NJKD = kv_NJKD[self._written_PN[row]]
        if self._step is None:
            self._pool.layer(layer).index_copy_(0, self._slots_PN[row], written_kv_NJKD)
            return q_NHD.new_zeros(len(q_NHD), q_NHD.shape[1] * self._pool.layout.value_dim)
        attended_NA = self._step(layer, q_NHD[: self._rows], written_kv_NJKD, traits)
        if self._rows == len(q_NHD):
            return attended_NA
        out_NA = attended_NA.new_zeros(len(q_NHD), attended_NA.shape[1])
        out_NA[: self._rows] = attended_NA
        return out_NA

    def _read_tables(self) -> None:
        items = _items(self._tables, self._pool.page_size)
        self._rows = sum(item.query_len for item in items)
        slots_PN = self._tables.slots_PN
        self._written_PN = [(slots_N >= 0).nonzero()[:, 0] for slots_N in slots_PN]
        self._slots_PN = [
            slots_N[written_N] for slots_N, written_N in zip(slots_PN, self._written_PN, strict=True)
        ]
        self._step = self._backend.begin(items, self._slots_PN) if items else None


def _items(tables: AttentionTables, page_size: int) -> list[AttentionItem]:
    starts, kv_lens = tables.query_starts_B1.tolist(), tables.kv_lens_B.tolist()
    full_BM, *windows = [pages_BM.cpu().numpy() for pages_BM in tables.pages_PBM]
    items = []
    for row, kv_len in enumerate(kv_lens):
        query_len, count = starts[row + 1] - starts[row], -(-kv_len // page_size)
        if query_len > 0:
            window_pages = windows[0][row, :count] if windows else None
            items.append(AttentionItem(query_len, kv_len, full_BM[row, :count], False, window_pages))
    return items
