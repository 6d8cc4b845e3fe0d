"""Attention with torch's own operators, tuned for a CPU: keys and values are read in place where they lie.

Legend: L layers, N tokens of the step, n and T one request's query and key tokens, H query heads, K key/value
heads, G = H / K queries per key head, D head size, S pool slots, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.attention.interface import AttentionItem
from engine.runner.kv_pool import KVPool


@dataclass(slots=True)
class _Span:
    """One request's rows and where its keys are.

    `views` holds each layer's keys [K, D, T] and values [K, T, D] where they lie in the pool; without it they are
    gathered from `pages`. `mask` [n, T] is 0 where a query may look, else -inf; None if it is the plain causal one.
    """

    row: int
    query_len: int
    kv_len: int
    views: list[tuple[Tensor, Tensor]] | None
    pages: Tensor | None
    mask: Tensor | None


class TorchAttention:
    """An AttentionBackend."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._device = pool.kv_L2KSD.device
        num_layers, _, kv_heads, _, dim = pool.kv_L2KSD.shape
        self._keys_LKDS = pool.kv_L2KSD[:, 0].transpose(2, 3)
        self._values_LKSD = pool.kv_L2KSD[:, 1]
        self._layers_S2KD = [pool.layer(index) for index in range(num_layers)]
        paged_shape = (num_layers, 2, kv_heads, pool.num_pages, pool.page_size, dim)
        self._layers_2KPpD = pool.kv_L2KSD.view(paged_shape).unbind(0)
        self._scale = torch.tensor(dim**-0.5, dtype=pool.kv_L2KSD.dtype, device=self._device)

    def begin(self, items: Sequence[AttentionItem], slots_N: Tensor) -> TorchAttentionStep:
        spans, row = [], 0
        for item in items:
            spans.append(self._span(item, row))
            row += item.query_len
        return TorchAttentionStep(self._layers_S2KD, self._layers_2KPpD, self._scale, spans, slots_N)

    def _span(self, item: AttentionItem, row: int) -> _Span:
        views, pages, mask = None, None, None
        if item.contiguous:
            first = int(item.pages[0]) * self._pool.page_size
            keys = self._keys_LKDS.narrow(3, first, item.kv_len).unbind(0)
            views = list(zip(keys, self._values_LKSD.narrow(2, first, item.kv_len).unbind(0), strict=True))
        else:
            count = -(-item.kv_len // self._pool.page_size)
            pages = torch.from_numpy(item.pages[:count].astype("int64")).to(self._device)
        history = item.kv_len - item.query_len
        if history > 0 and item.query_len > 1:
            hidden = torch.full((item.query_len, item.kv_len), -torch.inf, dtype=self._scale.dtype)
            mask = hidden.to(self._device).triu_(history + 1)
        return _Span(row, item.query_len, item.kv_len, views, pages, mask)


class TorchAttentionStep:
    """An AttentionStep."""

    def __init__(
        self,
        layers_S2KD: Sequence[Tensor],
        layers_2KPpD: Sequence[Tensor],
        scale: Tensor,
        spans: list[_Span],
        slots_N: Tensor,
    ) -> None:
        self._layers_S2KD = layers_S2KD
        self._layers_2KPpD = layers_2KPpD
        self._scale = scale
        self._spans = spans
        self._slots_N = slots_N
        self._decode_only = all(span.query_len == 1 for span in spans)

    def __call__(self, layer: int, q_NHD: Tensor, kv_N2KD: Tensor) -> Tensor:
        self._layers_S2KD[layer].index_copy_(0, self._slots_N, kv_N2KD)
        rows, heads, dim = q_NHD.shape
        kv_heads = kv_N2KD.shape[2]
        q_NKGD = q_NHD.mul(self._scale).view(rows, kv_heads, heads // kv_heads, dim)
        if self._decode_only:
            outputs_KGD = [
                _attend_one(q_KGD, *self._keys_and_values(span, layer))
                for q_KGD, span in zip(q_NKGD.unbind(0), self._spans, strict=True)
            ]
            if rows == 1:
                return outputs_KGD[0].view(1, -1)
            return torch.stack(outputs_KGD).view(rows, -1)
        out_NKGD = torch.empty_like(q_NKGD)
        for span in self._spans:
            share = slice(span.row, span.row + span.query_len)
            out_NKGD[share] = self._attend(span, layer, q_NKGD[share])
        return out_NKGD.view(rows, -1)

    def _attend(self, span: _Span, layer: int, q_nKGD: Tensor) -> Tensor:
        """One request's rows [n, K, G, D]; queries are already scaled."""
        keys_KDT, values_KTD = self._keys_and_values(span, layer)
        if span.query_len == 1:
            return _attend_one(q_nKGD[0], keys_KDT, values_KTD)[None]
        group = q_nKGD.shape[2]
        keys_KGTD = keys_KDT.transpose(1, 2)[:, None].expand(-1, group, -1, -1)
        values_KGTD = values_KTD[:, None].expand(-1, group, -1, -1)
        out_KGnD = sdpa(
            q_nKGD.permute(1, 2, 0, 3),
            keys_KGTD,
            values_KGTD,
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=1.0,
        )
        return out_KGnD.permute(2, 0, 1, 3)

    def _keys_and_values(self, span: _Span, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [K, D, T] and values [K, T, D]: views of the pool, else gathered now (this layer is written)."""
        if span.views is not None:
            return span.views[layer]
        assert span.pages is not None
        paged_2KPpD = self._layers_2KPpD[layer].index_select(2, span.pages)
        keys_KTD, values_KTD = paged_2KPpD.flatten(2, 3)[:, :, : span.kv_len].unbind(0)
        return keys_KTD.transpose(1, 2), values_KTD


def _attend_one(q_KGD: Tensor, keys_KDT: Tensor, values_KTD: Tensor) -> Tensor:
    """Decode: the group's queries are rows of one key head, so no key is repeated, and none is masked."""
    weights_KGT = torch.bmm(q_KGD, keys_KDT).softmax(-1)
    return torch.bmm(weights_KGT, values_KTD)
