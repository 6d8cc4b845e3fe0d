"""Attention tables made from a step's items, for backends that read their plan on the device.

Legend: P pools, N tokens of the step, B items, M pages of the longest item.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import (
    AttentionItem,
    AttentionStep,
    AttentionTables,
    ItemLens,
    TableAttention,
)


class ItemAttention:
    """An AttentionBackend over a TableAttention: for steps that come as items, outside CUDA graphs."""

    def __init__(self, tables: TableAttention, device: torch.device) -> None:
        self._tables = tables
        self._device = device

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> AttentionStep:
        return self._tables.plan(tables_of(items, slots_PN, self._device))


def tables_of(
    items: Sequence[AttentionItem], slots_PN: Sequence[Tensor], device: torch.device
) -> AttentionTables:
    starts_B1 = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum([item.query_len for item in items], out=starts_B1[1:])
    kv_lens_B = np.array([item.kv_len for item in items], dtype=np.int32)
    by_pool = [[item.pages for item in items]]
    if len(slots_PN) > 1:
        by_pool.append([item.window_pages for item in items if item.window_pages is not None])
    pages_PBM = []
    for tables in by_pool:
        pages_BM = np.full((len(items), max(len(table) for table in tables)), -1, dtype=np.int32)
        for row, table in enumerate(tables):
            pages_BM[row, : len(table)] = table
        pages_PBM.append(torch.from_numpy(pages_BM).to(device))
    return AttentionTables(
        torch.from_numpy(starts_B1).to(device),
        torch.from_numpy(kv_lens_B).to(device),
        tuple(pages_PBM),
        tuple(slots_PN),
        max(item.query_len for item in items),
        int(kv_lens_B.max()),
        tuple(ItemLens(item.query_len, item.kv_len) for item in items),
    )
