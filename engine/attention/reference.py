"""Attention as the textbook writes it, token by token, in float64. The yardstick for every backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionItem, LayerTraits
from engine.runner.kv_pool import KVPool


class ReferenceAttention:
    """An AttentionBackend for tests."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> ReferenceStep:
        return ReferenceStep(self._pool, items, slots_PN)


class ReferenceStep:
    def __init__(self, pool: KVPool, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> None:
        self._pool = pool
        self._items = items
        self._slots_PN = slots_PN

    def __call__(self, layer: int, q_NHD: Tensor, kv_N2KD: Tensor, traits: LayerTraits) -> Tensor:
        pool_S2KD = self._pool.layer(layer)
        windowed = self._pool.places[layer][0] is self._pool.window
        for row, slot in enumerate(self._slots_PN[int(windowed)].tolist()):
            pool_S2KD[slot] = kv_N2KD[row]
        rows, row = [], 0
        for item in self._items:
            for offset in range(item.query_len):
                position = item.kv_len - item.query_len + offset
                kv_T2KD = pool_S2KD[self._visible_slots(item, position, windowed, traits.window)].double()
                rows.append(_attend(q_NHD[row].double(), kv_T2KD, traits))
                row += 1
        return torch.stack(rows).view(len(q_NHD), -1).to(q_NHD.dtype)

    def _visible_slots(
        self, item: AttentionItem, position: int, windowed: bool, window: int | None
    ) -> list[int]:
        pages, size = item.window_pages if windowed else item.pages, self._pool.page_size
        assert pages is not None
        first = 0 if window is None else max(0, position - window + 1)
        return [int(pages[t // size]) * size + t % size for t in range(first, position + 1)]


def _attend(q_HD: Tensor, kv_T2KD: Tensor, traits: LayerTraits) -> Tensor:
    """One query over all it sees: [H, D]."""
    outputs, group = [], len(q_HD) // kv_T2KD.shape[2]
    for head, q_D in enumerate(q_HD):
        k_TD, v_TD = kv_T2KD[:, :, head // group].unbind(1)
        scores_T = k_TD @ q_D * traits.scale
        if traits.softcap is not None:
            scores_T = torch.tanh(scores_T / traits.softcap) * traits.softcap
        powers_T = torch.exp(scores_T)
        total = powers_T.sum()
        if traits.sinks_H is not None:
            total += torch.exp(traits.sinks_H[head].double())
        outputs.append(powers_T / total @ v_TD)
    return torch.stack(outputs)
