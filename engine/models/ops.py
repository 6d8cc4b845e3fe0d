"""The small operators of a decoder layer, behind one interface. Torch's own are here, fused kernels for a GPU in
engine/kernels/.

Legend: N tokens, E size of what is normalised, G groups with weights of their own, H heads, D head size, F inner size
of the MLP, C = D / 2 rotary frequencies, A query, key and value heads.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from engine.attention.interface import KVTarget
from engine.models.layers import RmsNorm, rotate_


class Norm(Protocol):
    """RMS normalisation with weights [E], or [G, E] for inputs [N, G, E]."""

    def __call__(self, x_NE: Tensor, /) -> Tensor:
        """Leaves x unchanged. The last dimension of x must be dense, the others may be strided; the result is dense."""

    def add_(self, x_NE: Tensor, delta_NE: Tensor, /) -> Tensor:
        """Adds delta to x in place and returns x normalised."""


class Rotation(Protocol):
    """Rotates query and key heads by their positions."""

    def __call__(self, x_NHD: Tensor, rotations_N1C: Tensor, /) -> None:
        """Normalises each head if it has weights, then rotates interleaved pairs, in place. Each head must be dense;
        N and H may be strided."""


@runtime_checkable
class WritingRotation(Rotation, Protocol):
    """A Rotation that can also write keys and values to the pool."""

    def into(self, qkv_NAD: Tensor, rotations_N1C: Tensor, target: KVTarget, /) -> None:
        """As a call on the queries. Keys, rotated in the same way, and values are written to the target; in `qkv_NAD`
        they stay unchanged."""


class DecoderOps(Protocol):
    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def rotation(self, weight_HD: Tensor | None, eps: float) -> Rotation:
        """With weights [H, D], each head is normalised first."""

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        """silu(gate) * up, [N, F]; gate is the first half of each row."""


class TorchOps:
    """DecoderOps with torch's own operators."""

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return RmsNorm(weight, eps)

    def rotation(self, weight_HD: Tensor | None, eps: float) -> Rotation:
        return rotate_ if weight_HD is None else _NormedRotation(RmsNorm(weight_HD, eps))

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
        return F.silu(gate_NF).mul_(up_NF)


class _NormedRotation:
    def __init__(self, norm: RmsNorm) -> None:
        self._norm = norm

    def __call__(self, x_NHD: Tensor, rotations_N1C: Tensor) -> None:
        x_NHD.copy_(self._norm(x_NHD))
        rotate_(x_NHD, rotations_N1C)
