"""Attention with torch's own operators, tuned for a CPU: keys and values are read in place.

Legend: P pools, L a pool's layers, N tokens of the step, n and T one request's query and key tokens, H query heads, K
key/value heads, G = H / K queries per key head, R = G * n rows that share a key head, D head size, V size of a value
(D, or that of a latent), J vectors of a head (kv_pool.py), S pool slots, p pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.attention.interface import AttentionItem, LayerTraits
from engine.runner.kv_pool import KVPool, PagedKV

FEW_ROWS = 32
"""Up to this many rows of one key head (R), two plain products beat torch's fused operator, which reads the keys once
for each query head."""

SCORE_ROWS = 64
"""Queries whose scores are held at once where the fused operator cannot be used (soft caps, sinks)."""


@dataclass(slots=True)
class _Span:
    """One request's rows and the keys they see.

    `views` holds each layer's keys [K, D, T] and values [K, T, V] where they lie in the pool. Without it they are
    gathered from `pages`, beginning `skip` tokens into the first page. `mask_nT` is 0 where a query may look, else
    -inf; `mask_RT` is the same for each query of a group; both are None if no query is masked or the mask is the plain
    causal one.
    """

    row: int
    query_len: int
    key_len: int
    views: list[tuple[Tensor, Tensor]] | None
    pages: Tensor | None
    skip: int
    mask_nT: Tensor | None
    mask_RT: Tensor | None


class _PoolViews:
    """One pool's memory, in the views that are written and read."""

    def __init__(self, paged: PagedKV, row: int, value_dim: int) -> None:
        layers, vectors, kv_heads, _, dim = paged.kv_LJKSD.shape
        self.paged = paged
        self.row = row
        self.kv_heads = kv_heads
        self.keys_LKDS = paged.kv_LJKSD[:, 0].transpose(2, 3)
        self.value_dim = value_dim
        self.values_LKSV = paged.kv_LJKSD[:, -1, ..., : self.value_dim]
        self.layers_SJKD = [paged.layer(index) for index in range(layers)]
        paged_shape = (layers, vectors, kv_heads, paged.num_pages, paged.page_size, dim)
        self.layers_JKpsD = paged.kv_LJKSD.view(paged_shape).unbind(0)

    def span(self, item: AttentionItem, row: int, window: int | None, group: int) -> _Span:
        """`row` is the item's first row; `group` is G."""
        history, size = item.kv_len - item.query_len, self.paged.page_size
        first = 0 if window is None else max(0, history - window + 1)
        key_len, first_page = item.kv_len - first, first // size
        table = item.pages if self.row == 0 else item.window_pages
        assert table is not None
        table = table[first_page : -(-item.kv_len // size)]
        views, pages = None, None
        if (item.contiguous and self.row == 0) or _ascending(table):
            start = int(table[0]) * size + first - first_page * size
            keys = self.keys_LKDS.narrow(3, start, key_len).unbind(0)
            views = list(zip(keys, self.values_LKSV.narrow(2, start, key_len).unbind(0), strict=True))
        else:
            pages = torch.from_numpy(table).to(self.paged.kv_LJKSD.device)  # on a CPU where it lies
        mask_nT = mask_RT = None
        if item.query_len > 1 and (history > 0 or (window is not None and item.kv_len > window)):
            mask_nT = self._mask(item.query_len, key_len, window)
        if mask_nT is not None and group * item.query_len <= FEW_ROWS:
            mask_RT = mask_nT.repeat(group, 1)
        return _Span(row, item.query_len, key_len, views, pages, first % size, mask_nT, mask_RT)

    def _mask(self, query_len: int, key_len: int, window: int | None) -> Tensor:
        """The last query sees the last key."""
        kv = self.paged.kv_LJKSD
        hidden_nT = torch.full((query_len, key_len), -torch.inf, dtype=kv.dtype, device=kv.device)
        last = key_len - query_len
        mask_nT = hidden_nT.triu(last + 1)
        return mask_nT if window is None else mask_nT.add_(hidden_nT.tril_(last - window))

    def keys_and_values(self, span: _Span, place: int) -> tuple[Tensor, Tensor]:
        """Keys [K, D, T] and values [K, T, V]: views of the pool, or gathered now, after this layer was written."""
        if span.views is not None:
            return span.views[place]
        assert span.pages is not None
        paged_JKpsD = self.layers_JKpsD[place].index_select(2, span.pages)
        kv_JKTD = paged_JKpsD.flatten(2, 3).narrow(2, span.skip, span.key_len)
        return kv_JKTD[0].transpose(1, 2), kv_JKTD[-1, ..., : self.value_dim]


class TorchAttention:
    """An AttentionBackend."""

    def __init__(self, pool: KVPool) -> None:
        value_dim = pool.layout.value_dim
        views = {id(pool.full): _PoolViews(pool.full, 0, value_dim)}
        if pool.window is not None:
            views[id(pool.window)] = _PoolViews(pool.window, 1, value_dim)
        self._layers = [(views[id(paged)], place) for paged, place in pool.places]
        self._scales: dict[float, Tensor] = {}

    def begin(self, items: Sequence[AttentionItem], slots_PN: Sequence[Tensor]) -> TorchAttentionStep:
        return TorchAttentionStep(self._layers, self._scales, items, slots_PN)


class TorchAttentionStep:
    """An AttentionStep. Layers that read the same pool through the same window share their plan."""

    def __init__(
        self,
        layers: list[tuple[_PoolViews, int]],
        scales: dict[float, Tensor],
        items: Sequence[AttentionItem],
        slots_PN: Sequence[Tensor],
    ) -> None:
        self._layers = layers
        self._scales = scales
        self._items = items
        self._slots_PN = slots_PN
        self._plans: dict[tuple[int, int | None], list[_Span]] = {}
        self._decode_only = all(item.query_len == 1 for item in items)

    def __call__(self, layer: int, q_NHD: Tensor, kv_NJKD: Tensor, traits: LayerTraits) -> Tensor:
        views, place = self._layers[layer]
        views.layers_SJKD[place].index_copy_(0, self._slots_PN[views.row], kv_NJKD)
        rows, heads, dim = q_NHD.shape
        group = heads // views.kv_heads
        spans = self._plans.get((views.row, traits.window)) or self._plan(views, traits.window, group)
        scale = self._scales.get(traits.scale)
        if scale is None:
            scale = torch.tensor(traits.scale, dtype=q_NHD.dtype, device=q_NHD.device)
            self._scales[traits.scale] = scale
        q_NKGD = q_NHD.mul(scale).view(rows, views.kv_heads, group, dim)
        if self._decode_only and traits.plain_scores:
            outputs_KGV = [
                _attend_one(q_KGD, *views.keys_and_values(span, place))
                for q_KGD, span in zip(q_NKGD.unbind(0), spans, strict=True)
            ]
            return (outputs_KGV[0] if rows == 1 else torch.stack(outputs_KGV)).view(rows, -1)
        outputs = []
        for span in spans:
            share_NKGD = q_NKGD[span.row : span.row + span.query_len]
            keys_KDT, values_KTV = views.keys_and_values(span, place)
            attended_nKGV = _attend(span, share_NKGD, keys_KDT, values_KTV, traits)
            outputs.append(attended_nKGV.reshape(span.query_len, -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan(self, views: _PoolViews, window: int | None, group: int) -> list[_Span]:
        spans, row = [], 0
        for item in self._items:
            spans.append(views.span(item, row, window, group))
            row += item.query_len
        self._plans[views.row, window] = spans
        return spans


def _attend_one(q_KGD: Tensor, keys_KDT: Tensor, values_KTV: Tensor) -> Tensor:
    """Decode: the group's queries are rows of one key head, so no key is repeated, and no key is masked."""
    weights_KGT = torch.bmm(q_KGD, keys_KDT).softmax(-1)
    return torch.bmm(weights_KGT, values_KTV)


def _attend(span: _Span, q_nKGD: Tensor, keys_KDT: Tensor, values_KTV: Tensor, traits: LayerTraits) -> Tensor:
    """One request's rows [n, K, G, D]; queries are already scaled."""
    count, kv_heads, group, dim = q_nKGD.shape
    q_KGnD = q_nKGD.permute(1, 2, 0, 3)
    if traits.plain_scores and (count == 1 or span.mask_RT is not None):
        out_KRV = _attend_rows(q_KGnD.reshape(kv_heads, -1, dim), keys_KDT, values_KTV, span.mask_RT)
        return out_KRV.view(kv_heads, group, count, -1).permute(2, 0, 1, 3)
    if traits.plain_scores:
        keys_KGTD = keys_KDT.transpose(1, 2)[:, None].expand(-1, group, -1, -1)
        values_KGTV = values_KTV[:, None].expand(-1, group, -1, -1)
        causal, value_dim = span.mask_nT is None, values_KTV.shape[-1]
        if value_dim < dim:  # a latent, the front of its key: the operator is fast for values as wide as keys
            values_KGTV = keys_KGTD
        out_KGnV = sdpa(q_KGnD, keys_KGTD, values_KGTV, attn_mask=span.mask_nT, is_causal=causal, scale=1.0)
        return out_KGnV[..., :value_dim].permute(2, 0, 1, 3)
    mask_nT = span.mask_nT
    if mask_nT is None and count > 1:
        mask_nT = q_nKGD.new_full((count, count), -torch.inf).triu_(1)
    blocks = []
    for first in range(0, count, SCORE_ROWS):
        rows = slice(first, first + SCORE_ROWS)
        mask = None if mask_nT is None else mask_nT[rows]
        blocks.append(_attend_scores(q_KGnD[:, :, rows], keys_KDT, values_KTV, mask, traits))
    return torch.cat(blocks, 2).permute(2, 0, 1, 3)


def _attend_rows(q_KRD: Tensor, keys_KDT: Tensor, values_KTV: Tensor, mask_RT: Tensor | None) -> Tensor:
    if mask_RT is None:
        return _attend_one(q_KRD, keys_KDT, values_KTV)
    weights_KRT = torch.baddbmm(mask_RT, q_KRD, keys_KDT).softmax(-1)
    return torch.bmm(weights_KRT, values_KTV)


def _attend_scores(
    q_KGnD: Tensor, keys_KDT: Tensor, values_KTV: Tensor, mask_nT: Tensor | None, traits: LayerTraits
) -> Tensor:
    """Attention with soft caps and sinks; returns [K, G, n, V]."""
    kv_heads, group, count, dim = q_KGnD.shape
    scores_KRT = torch.bmm(q_KGnD.reshape(kv_heads, -1, dim), keys_KDT)
    if traits.softcap is not None:
        scores_KRT = scores_KRT.div_(traits.softcap).tanh_().mul_(traits.softcap)
    if mask_nT is not None:
        scores_KRT.view(kv_heads, group, count, -1).add_(mask_nT)
    if traits.sinks_H is None:
        weights_KRT = scores_KRT.softmax(-1)
    else:
        sinks_KG11 = traits.sinks_H.to(scores_KRT.dtype).view(kv_heads, group, 1, 1)
        sinks_KR1 = sinks_KG11.expand(-1, -1, count, -1).reshape(kv_heads, -1, 1)
        weights_KRT = torch.cat((scores_KRT, sinks_KR1), -1).softmax(-1)[..., :-1]
    return torch.bmm(weights_KRT, values_KTV).view(kv_heads, group, count, -1)


def _ascending(pages: NDArray[np.int32]) -> bool:
    count = len(pages)
    if int(pages[-1]) - int(pages[0]) != count - 1:
        return False
    return count < 3 or bool((np.diff(pages) == 1).all())
