"""The small operators of a decoder layer, behind one interface: torch's own here, fused kernels for a GPU in
engine/kernels/.

Legend: N tokens, E size of what is normalised, G groups with weights of their own, H heads, D head size, F inner size
of the MLP, C = D / 2 rotary frequencies.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from engine.models.layers import RmsNorm, rotate_


class Norm(Protocol):
    """RMS normalisation with weights [E], or [G, E] for inputs [N, G, E]."""

    def __call__(self, x_NE: Tensor, /) -> Tensor:
        """Leaves x as it is. The last dimension of x must be dense, the others may be strided; the result is dense."""

    def add_(self, x_NE: Tensor, delta_NE: Tensor, /) -> Tensor:
        """Adds delta to x in place and gives x normalised."""


class DecoderOps(Protocol):
    def norm(self, weight: Tensor, eps: float) -> Norm: ...

    def rotate_(self, x_NHD: Tensor, rotations_N1C: Tensor) -> None:
        """Rotates interleaved pairs in place. Each head must be dense; N and H may be strided."""

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        """silu(gate) * up, [N, F]; gate is the first half of each row."""


class TorchOps:
    """DecoderOps of torch's own operators."""

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return RmsNorm(weight, eps)

    def rotate_(self, x_NHD: Tensor, rotations_N1C: Tensor) -> None:
        rotate_(x_NHD, rotations_N1C)

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
        return F.silu(gate_NF).mul_(up_NF)
