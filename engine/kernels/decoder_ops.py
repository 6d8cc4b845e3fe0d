"""The small operators of a decoder layer as fused kernels: a DecoderOps for a GPU.

Legend: N tokens, E size of what is normalised, H heads, D head size, F inner size of the MLP, C = D / 2 rotary
frequencies, A query, key and value heads.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.interface import KVTarget
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rotary import rotate_heads_
from engine.kernels.rotate_write import rotate_and_write
from engine.kernels.silu_mul import silu_mul
from engine.models.ops import Norm, Rotation


class TritonNorm:
    """A Norm: one launch, with or without the residual sum."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.contiguous()
        self._eps = eps

    def __call__(self, x_NE: Tensor) -> Tensor:
        return rms_norm(x_NE, self._weight, self._eps)

    def add_(self, x_NE: Tensor, delta_NE: Tensor) -> Tensor:
        return rms_norm(x_NE, self._weight, self._eps, delta_NE)


class TritonRotation:
    """A WritingRotation: one launch, with or without the heads' norms."""

    def __init__(self, weight_HD: Tensor | None, eps: float) -> None:
        self._weight_HD = None if weight_HD is None else weight_HD.contiguous()
        self._eps = eps

    def __call__(self, x_NHD: Tensor, rotations_N1C: Tensor) -> None:
        rotate_heads_(x_NHD, rotations_N1C, self._weight_HD, self._eps)

    def into(self, qkv_NAD: Tensor, rotations_N1C: Tensor, target: KVTarget) -> None:
        rotate_and_write(qkv_NAD, rotations_N1C, self._weight_HD, self._eps, target)


class TritonOps:
    """DecoderOps with this package's kernels."""

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return TritonNorm(weight, eps)

    def rotation(self, weight_HD: Tensor | None, eps: float) -> Rotation:
        return TritonRotation(weight_HD, eps)

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        return silu_mul(gate_up_N2F)
