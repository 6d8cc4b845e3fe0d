"""Attention as a textbook writes it, token by token, in float64. Every backend is compared with it.

Legend: N tokens of the step, n of a request, T keys that a query sees, H query heads, J vectors of a head (2, or 1 that
is a latent), K key/value heads, D head size, V size of a value, S pool slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import AttentionItem, LayerTraits
from engine.runner.kv_pool import FP8, KVPool

FP8_LARGEST = torch.finfo(FP8).max


class ReferenceAttention:
    """A slow AttentionBackend for tests."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> ReferenceStep:
        return ReferenceStep(self._pool, items, slots_PN)


class ReferenceStep:
    def __init__(self, pool: KVPool, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> None:
        self._pool = pool
        self._items = items
        self._slots_PN = slots_PN

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        self.write(layer, kv_NJKD)
        windowed = self._pool.places[layer][0] is self._pool.window
        rows, row = [], 0
        for item in self._items:
            for offset in range(item.query_len):
                position = item.kv_len - item.query_len + offset
                kv_TJKD = self._read(layer, self._visible_slots(item, position, windowed, traits.window))
                rows.append(_attend(q_NHD[row].double(), kv_TJKD, self._pool.layout.value_dim, traits))
                row += 1
        return torch.stack(rows).view(len(q_NHD), -1).to(q_NHD.dtype)

    def write(self, layer: int, kv_NJKD: Tensor) -> None:
        windowed = self._pool.places[layer][0] is self._pool.window
        for row, slot in enumerate(self._slots_PN[int(windowed)].tolist()):
            if slot >= 0:
                self._write(layer, slot, kv_NJKD[row])

    def _write(self, layer: int, slot: int, kv_JKD: Tensor) -> None:
        paged, place = self._pool.places[layer]
        pool_JKD = paged.kv_LJKSD[place, :, :, slot]
        if paged.scales_LJKS is None:
            pool_JKD.copy_(kv_JKD)
            return
        kv_JKD = kv_JKD.float()
        largest_JK = kv_JKD.abs().amax(-1)
        scales_JK = largest_JK / torch.full_like(
            largest_JK, FP8_LARGEST
        )  # a GPU divides inexactly by a number
        scales_JK[scales_JK == 0] = 1
        pool_JKD.copy_((kv_JKD / scales_JK[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST))
        paged.scales_LJKS[place, :, :, slot] = scales_JK

    def _read(self, layer: int, slots: list[int]) -> Tensor:
        """The keys and values of these slots: [T, J, K, D] in float64."""
        paged, place = self._pool.places[layer]
        kv_TJKD = paged.layer(place).view(_bits(paged.kv_LJKSD.dtype))[slots].view(paged.kv_LJKSD.dtype)
        if paged.scales_LJKS is None:
            return kv_TJKD.double()
        return kv_TJKD.double() * paged.scales_LJKS[place][:, :, slots].permute(2, 0, 1)[..., None].double()

    def _visible_slots(
        self, item: AttentionItem, position: int, windowed: bool, window: int | None
    ) -> list[int]:
        pages, size = item.window_pages if windowed else item.pages, self._pool.page_size
        assert pages is not None
        first = 0 if window is None else max(0, position - window + 1)
        return [int(pages[t // size]) * size + t % size for t in range(first, position + 1)]


def _bits(dtype: torch.dtype) -> torch.dtype:
    """The dtype to gather with: torch does not gather float8."""
    return torch.uint8 if dtype == FP8 else dtype


def _attend(q_HD: Tensor, kv_TJKD: Tensor, value_dim: int, traits: LayerTraits) -> Tensor:
    """Attention of one query over all that it sees: [H, V]."""
    group = len(q_HD) // kv_TJKD.shape[2]
    kv_TJHD = kv_TJKD.repeat_interleave(group, 2)
    k_THD, v_THV = kv_TJHD[:, 0], kv_TJHD[:, -1, :, :value_dim]
    scores_TH = (k_THD * q_HD).sum(-1) * traits.scale
    if traits.softcap is not None:
        scores_TH = torch.tanh(scores_TH / traits.softcap) * traits.softcap
    powers_TH = torch.exp(scores_TH)
    total_H = powers_TH.sum(0)
    if traits.sinks_H is not None:
        total_H += torch.exp(traits.sinks_H.double())
    return ((powers_TH / total_H)[..., None] * v_THV).sum(0)
