"""Attention with torch's own operators, tuned for a CPU: keys and values are read in place where they lie.

Legend: N tokens of the step, n and T one request's query and key tokens, H query heads, K key/value heads,
G = H / K queries per key head, D head size, S pool slots.
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
    """One request's rows and keys. Keys are slots first_slot .. first_slot + kv_len, or those of `pages`.

    `mask` [n, T] is True where a query may look; None for decode, and for a prompt's start, which is causal.
    """

    row: int
    query_len: int
    kv_len: int
    first_slot: int
    pages: Tensor | None
    mask: Tensor | None


class TorchAttention:
    """An AttentionBackend."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._device = pool.kv_LS2KD.device

    def begin(self, items: Sequence[AttentionItem], slots_N: Tensor) -> TorchAttentionStep:
        spans, row = [], 0
        for item in items:
            spans.append(self._span(item, row))
            row += item.query_len
        return TorchAttentionStep(self._pool, spans, slots_N)

    def _span(self, item: AttentionItem, row: int) -> _Span:
        history, pages, first_slot = item.kv_len - item.query_len, None, 0
        if item.contiguous:
            first_slot = int(item.pages[0]) * self._pool.page_size
        else:
            count = -(-item.kv_len // self._pool.page_size)
            pages = torch.from_numpy(item.pages[:count].astype("int64")).to(self._device)
        mask = None
        if history > 0 and item.query_len > 1:
            ones = torch.ones(item.query_len, item.kv_len, dtype=torch.bool, device=self._device)
            mask = ones.tril_(history)
        return _Span(row, item.query_len, item.kv_len, first_slot, pages, mask)


class TorchAttentionStep:
    """An AttentionStep."""

    def __init__(self, pool: KVPool, spans: list[_Span], slots_N: Tensor) -> None:
        self._pool = pool
        self._spans = spans
        self._slots_N = slots_N

    def __call__(self, layer: int, q_NHD: Tensor, kv_N2KD: Tensor) -> Tensor:
        pool_S2KD = self._pool.layer(layer)
        pool_S2KD.index_copy_(0, self._slots_N, kv_N2KD)
        outputs = [self._attend(span, pool_S2KD, q_NHD) for span in self._spans]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, span: _Span, pool_S2KD: Tensor, q_NHD: Tensor) -> Tensor:
        """One request's rows [n, H * D]."""
        kv_2KTD = self._keys_and_values(span, pool_S2KD)
        kv_heads, dim = kv_2KTD.shape[1], kv_2KTD.shape[3]
        q_nKGD = q_NHD[span.row : span.row + span.query_len].view(span.query_len, kv_heads, -1, dim)
        if span.query_len == 1:
            # The group's queries are rows of one key head: no key is repeated, none is masked.
            out_1KGD = sdpa(q_nKGD, kv_2KTD[0:1], kv_2KTD[1:2])
            return out_1KGD.reshape(1, -1)
        group = q_nKGD.shape[2]
        keys, values = kv_2KTD.unsqueeze(2).expand(2, kv_heads, group, span.kv_len, dim).unbind(0)
        out_KGnD = sdpa(
            q_nKGD.permute(1, 2, 0, 3), keys, values, attn_mask=span.mask, is_causal=span.mask is None
        )
        return out_KGnD.permute(2, 0, 1, 3).reshape(span.query_len, -1)

    def _keys_and_values(self, span: _Span, pool_S2KD: Tensor) -> Tensor:
        """[2, K, T, D]: a view of the pool where the pages are one run, else a gathered copy."""
        if span.pages is None:
            kv_T2KD = pool_S2KD[span.first_slot : span.first_slot + span.kv_len]
        else:
            paged = pool_S2KD.view(-1, self._pool.page_size, *pool_S2KD.shape[1:])
            kv_T2KD = paged.index_select(0, span.pages).flatten(0, 1)[: span.kv_len]
        return kv_T2KD.permute(1, 2, 0, 3)
