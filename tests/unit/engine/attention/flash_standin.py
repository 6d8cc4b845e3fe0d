"""Stands in for the flash-attention kernels of vllm: it has their real signatures, checks and blind spots.

It computes in float64. Like the kernels, it multiplies whole blocks of keys and gives masked keys the weight zero, so a
NaN anywhere in a block shows. It looks up pages as far as its last block reaches. With one query an item it takes row b
for item b.

Legend: N rows, n of an item, H query heads, K key/value heads, D head size, B items, T keys in whole blocks, P pages
of p tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK_KEYS = 128

IN_VLLM = """(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size: list[int] | None = None, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
    scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits: int = 0, output_scale=None,
    fa_version: int = 2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None,
    block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None, dynamic_causal=None,
    gather_kv_indices=None, gather_kv_valid_length=None,
)"""
"""The signature in vllm.vllm_flash_attn of vllm 0.33.0."""

STANDALONE = """(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None, *, out=None,
)"""
"""The signature in vllm_flash_attn 2.6.2."""


@dataclass(slots=True)
class Calls:
    """What the stand-in was called with."""

    seen: list[dict[str, Any]] = field(default_factory=list)


def stand_in(signature: str, calls: Calls) -> Callable[..., Tensor]:
    """A function with this signature. It notes its arguments in `calls` and computes."""

    def compute(arguments: dict[str, Any]) -> Tensor:
        calls.seen.append(arguments)
        return _attend(**arguments)

    source = f"def flash_attn_varlen_func{signature}:\n    return compute(dict(locals()))\n"
    names: dict[str, Any] = {"compute": compute}
    exec(source, names)
    function: Callable[..., Tensor] = names["flash_attn_varlen_func"]
    return function


def _attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Tensor:
    assert (cu_seqlens_k is None) != (seqused_k is None), "one of them says how many keys there are"
    lengths = seqused_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    assert lengths is not None
    _check(q, k, v, cu_seqlens_q, lengths, block_table)
    assert causal
    assert not any(others[name] for name in ("dropout_p", "alibi_slopes", "out") if name in others)
    assert s_aux is None or (fa_version == 3 and s_aux.dtype == torch.bfloat16 and s_aux.is_contiguous())
    assert int(lengths.max()) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    starts = cu_seqlens_q.tolist()
    if max_seqlen_q == 1:
        assert len(q) == len(lengths), "rows are reshaped to items"
        starts = list(range(len(q) + 1))
    out_NHD = torch.full_like(q, torch.nan)
    for item, length in enumerate(lengths.tolist()):
        first, last = starts[item], starts[item + 1]
        if length == 0:
            out_NHD[first:last] = 0
            continue
        keys = -(-length // BLOCK_KEYS) * BLOCK_KEYS
        window = length if window_size[0] < 0 else window_size[0] + 1
        positions_n1 = torch.arange(length - (last - first), length)[:, None]
        begin = max(0, length - (last - first) + 1 - window) // BLOCK_KEYS * BLOCK_KEYS
        seen_T = torch.arange(begin, keys)
        pages_T = block_table[item, seen_T // k.shape[1]].long()
        k_TKD, v_TKD = (part[pages_T, seen_T % k.shape[1]].double() for part in (k, v))
        visible_nT = (seen_T > positions_n1 - window) & (seen_T <= positions_n1)
        q_nHD = q[first:last].double()
        out_NHD[first:last] = _one_item(q_nHD, k_TKD, v_TKD, visible_nT, softmax_scale, softcap, s_aux)
    return out_NHD


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor
) -> None:
    """Checks what the kernels refuse. Also checks for page numbers outside the pool, which the kernels would follow."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert k.shape == v.shape
    assert k.shape[1] % 16 == 0
    assert k.shape[3] == q.shape[2]
    assert q.shape[1] % k.shape[2] == 0
    for part in (cu_seqlens_q, lengths, block_table):
        assert part.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert len(cu_seqlens_q) == len(lengths) + 1 == len(block_table) + 1
    assert ((block_table >= 0) & (block_table < len(k))).all()


def _one_item(
    q_nHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    visible_nT: Tensor,
    scale: float,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    group = q_nHD.shape[1] // k_TKD.shape[1]
    scores_HnT = torch.einsum("nhd,thd->hnt", q_nHD, k_TKD.repeat_interleave(group, 1)) * scale
    if softcap:
        scores_HnT = torch.tanh(scores_HnT / softcap) * softcap
    powers_HnT = scores_HnT.masked_fill(~visible_nT, -torch.inf).exp()
    total_Hn1 = powers_HnT.sum(-1, keepdim=True)
    if sinks_H is not None:
        total_Hn1 += sinks_H.double().exp()[:, None, None]
    return torch.einsum("hnt,thd->nhd", powers_HnT / total_Hn1, v_TKD.repeat_interleave(group, 1))
