"""Stands in for FlashAttention 3 over contiguous keys: it has the real signature and checks what the kernels refuse.

Legend: N rows, T keys of all items one after another, H query heads, K key/value heads, D head size, B items.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    """The signature in fa3_fwd_interface of fa3-fwd 0.0.3."""
    given = (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa)
    assert all(each is None for each in given)
    assert (attention_chunk, num_splits, deterministic, sm_margin, return_attn_probs) == (
        0,
        1,
        False,
        0,
        False,
    )
    assert causal
    assert window_size == (-1, -1), "the build has no windows"
    assert softmax_scale is not None
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, softcap)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16, "the build has no float16"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert int(starts[0]) == 0
    assert int(cu_seqlens_q[-1]) <= len(q)
    assert int(cu_seqlens_k[-1]) <= len(k)
    assert len(cu_seqlens_q) == len(cu_seqlens_k)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, softcap: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    out_NHD = torch.full_like(q, torch.nan)
    for item in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*starts[item : item + 2].tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
        k_THD, v_THD = (part[keys].double().repeat_interleave(group, 1) for part in (k, v))
        scores_HNT = torch.einsum("nhd,thd->hnt", q[rows].double(), k_THD) * scale
        if softcap:
            scores_HNT = torch.tanh(scores_HNT / softcap) * softcap
        count, total = scores_HNT.shape[1:]
        seen_NT = torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
        shares_HNT = scores_HNT.masked_fill(~seen_NT, -torch.inf).softmax(-1)
        out_NHD[rows] = torch.einsum("hnt,thd->nhd", shares_HNT, v_THD).to(q.dtype)
    return out_NHD
