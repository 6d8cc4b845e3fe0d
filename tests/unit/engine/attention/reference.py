"""Attention as a textbook writes it, item by item, in float64. Every backend is compared with it.

Legend: N tokens of the step, n of an item, T keys that its queries see, H query heads, J vectors of a head (2, or 1
that is a latent), K key/value heads, D head size, V size of a value, S pool slots.
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
        queries = q_NHD.double().split([item.query_len for item in self._items])
        rows = [
            self._attend(layer, q_nHD, item, traits) for q_nHD, item in zip(queries, self._items, strict=True)
        ]
        return torch.cat(rows).flatten(1).to(q_NHD.dtype)

    def write(self, layer: int, kv_NJKD: Tensor) -> None:
        paged, place = self._pool.places[layer]
        slots_N = self._slots_PN[int(paged is self._pool.window)].to(kv_NJKD.device)
        kv_JKND = kv_NJKD[: len(slots_N)][slots_N >= 0].permute(1, 2, 0, 3)
        slots_N = slots_N[slots_N >= 0]
        if paged.scales_LJKS is not None:
            kv_JKND = kv_JKND.float()
            largest_JKN = kv_JKND.abs().amax(-1)
            # A GPU divides inexactly by a number.
            scales_JKN = largest_JKN / torch.full_like(largest_JKN, FP8_LARGEST)
            scales_JKN[scales_JKN == 0] = 1
            kv_JKND = (kv_JKND / scales_JKN[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST)
            paged.scales_LJKS[place][:, :, slots_N] = scales_JKN
        _bits(paged.kv_LJKSD[place])[:, :, slots_N] = _bits(kv_JKND.to(paged.kv_LJKSD.dtype))

    def _attend(self, layer: int, q_nHD: Tensor, item: AttentionItem, traits: LayerTraits) -> Tensor:
        """Attention of an item's queries over what each of them sees: [n, H, V]."""
        window = item.kv_len if traits.window is None else traits.window
        positions_n1 = torch.arange(item.kv_len - item.query_len, item.kv_len, device=q_nHD.device)[:, None]
        first = max(0, item.kv_len - item.query_len - window + 1)
        keys_T = torch.arange(first, item.kv_len, device=q_nHD.device)
        seen_nT = (keys_T <= positions_n1) & (keys_T > positions_n1 - window)
        kv_TJKD = self._read(layer, item, range(first, item.kv_len))
        kv_TJHD = kv_TJKD.repeat_interleave(q_nHD.shape[1] // kv_TJKD.shape[2], 2)
        k_THD, v_THV = kv_TJHD[:, 0], kv_TJHD[:, -1, :, : self._pool.layout.value_dim]
        scores_HnT = torch.einsum("nhd,thd->hnt", q_nHD, k_THD) * traits.scale
        if traits.softcap is not None:
            scores_HnT = torch.tanh(scores_HnT / traits.softcap) * traits.softcap
        powers_HnT = torch.exp(scores_HnT) * seen_nT
        total_Hn1 = powers_HnT.sum(-1, keepdim=True)
        if traits.sinks_H is not None:
            total_Hn1 += torch.exp(traits.sinks_H.double())[:, None, None]
        return torch.einsum("hnt,thv->nhv", powers_HnT / total_Hn1, v_THV)

    def _read(self, layer: int, item: AttentionItem, tokens: range) -> Tensor:
        """The keys and values of some of an item's tokens: [T, J, K, D] in float64."""
        paged, place = self._pool.places[layer]
        pages, size = item.window_pages if paged is self._pool.window else item.pages, self._pool.page_size
        assert pages is not None
        slots = [int(pages[t // size]) * size + t % size for t in tokens]
        kv_TJKD = _bits(paged.layer(place))[slots].view(paged.kv_LJKSD.dtype).double()
        if paged.scales_LJKS is None:
            return kv_TJKD
        return kv_TJKD * paged.scales_LJKS[place][:, :, slots].permute(2, 0, 1)[..., None].double()


def _bits(part: Tensor) -> Tensor:
    """What to gather and to scatter in place of `part`: torch does neither with float8."""
    return part.view(torch.uint8) if part.dtype == FP8 else part
