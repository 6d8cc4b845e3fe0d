"""Attention in which key/value heads are shared by groups of query heads.

Legend: N tokens, E hidden size, H query heads, K key/value heads, D head size, C rotary frequencies, A query and key
heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.interface import AttentionStep, LayerTraits, OpenStep
from engine.models.linear import Linear
from engine.models.ops import Rotation, WritingRotation


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """`qkv` is one product for queries, keys and values. `rotate` normalises query and key heads first, if there is
    `head_norm_AD`."""

    traits: LayerTraits
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    head_norm_AD: Tensor | None
    rotate: Rotation

    def __call__(self, layer: int, x_NE: Tensor, rotations_N1C: Tensor, attend: AttentionStep) -> Tensor:
        """Returns [N, H * D]. Keys and values are written while keys are rotated, if rotation and attention support
        it."""
        heads, kv_heads, rows = self.num_heads, self.num_kv_heads, x_NE.shape[0]
        qkv_NHD = self.qkv(x_NE).view(rows, heads + 2 * kv_heads, self.head_dim)
        q_NHD = qkv_NHD[:, :heads]
        if isinstance(self.rotate, WritingRotation) and isinstance(attend, OpenStep):
            self.rotate.into(qkv_NHD, rotations_N1C, attend.target(layer))
            return attend.attend(layer, q_NHD, self.traits)
        self.rotate(qkv_NHD[:, : heads + kv_heads], rotations_N1C)
        kv_NJKD = qkv_NHD[:, heads:].view(rows, 2, kv_heads, self.head_dim)
        return attend(layer, q_NHD, kv_NJKD, self.traits)
