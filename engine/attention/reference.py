"""Attention as the textbook writes it, token by token, in float64. The yardstick for every backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionItem
from engine.runner.kv_pool import KVPool


class ReferenceAttention:
    """An AttentionBackend for tests."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def begin(self, items: Sequence[AttentionItem], slots_N: Tensor) -> ReferenceStep:
        return ReferenceStep(self._pool, items, slots_N)


class ReferenceStep:
    def __init__(self, pool: KVPool, items: Sequence[AttentionItem], slots_N: Tensor) -> None:
        self._pool = pool
        self._items = items
        self._slots_N = slots_N

    def __call__(self, layer: int, q_NHD: Tensor, kv_N2KD: Tensor) -> Tensor:
        pool_S2KD = self._pool.layer(layer)
        for row, slot in enumerate(self._slots_N.tolist()):
            pool_S2KD[slot] = kv_N2KD[row]
        page_size, group = self._pool.page_size, q_NHD.shape[1] // kv_N2KD.shape[2]
        rows, first = [], 0
        for item in self._items:
            slots = [int(item.pages[t // page_size]) * page_size + t % page_size for t in range(item.kv_len)]
            kv_T2KD = pool_S2KD[slots].double()
            for offset in range(item.query_len):
                visible = item.kv_len - item.query_len + offset + 1
                for head in range(q_NHD.shape[1]):
                    q_D = q_NHD[first + offset, head].double()
                    k_TD, v_TD = kv_T2KD[:visible, :, head // group].unbind(1)
                    weights_T = torch.softmax(k_TD @ q_D / q_D.numel() ** 0.5, dim=0)
                    rows.append(weights_T @ v_TD)
            first += item.query_len
        return torch.stack(rows).view(len(q_NHD), -1).to(q_NHD.dtype)
