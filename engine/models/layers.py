"""The small parts of the decoder: normalisation and rotary positions.

Legend: N tokens, E hidden size, H heads, D head size, C = D / 2 rotary frequencies.

Rotary pairs are interleaved here: features 2c and 2c+1 of a head rotate together, so that a head is a row of C complex
numbers and rotation is one multiplication. Checkpoints pair c with c + C; the loader reorders the rows of the query and
key weights (`interleave_rotary`). Scores stay the same, since queries and keys are reordered alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.rope import RopeSpec, rotary_frequencies


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension E, computed in float32.

    sqrt(sum(x^2) + E * eps) is the hypotenuse of |x| and sqrt(E * eps); the remaining factor sqrt(E) goes into the
    weights. This takes four small operators, the textbook's formula six.
    """

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        size = weight_E.shape[-1]
        self._weight_E = weight_E.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight_E.device)

    def __call__(self, x_NE: Tensor) -> Tensor:
        wide_NE = x_NE if x_NE.dtype == torch.float32 else x_NE.float()
        length_N1 = torch.linalg.vector_norm(wide_NE, 2, -1, True)
        normed_NE = wide_NE.div(torch.hypot(length_N1, self._floor)).mul_(self._weight_E)
        return normed_NE if x_NE.dtype == torch.float32 else normed_NE.to(x_NE.dtype)

    def add_(self, x_NE: Tensor, delta_NE: Tensor) -> Tensor:
        """Adds delta to x in place and returns x normalised."""
        return self(x_NE.add_(delta_NE))


def interleave_rotary(rows: Tensor, head_dim: int, plain_dim: int = 0) -> Tensor:
    """Reorders the first dimension (heads * D) from (half, half) to interleaved rotary pairs. The first `plain_dim` of
    each head stay where they are."""
    heads, pairs = rows.shape[0] // head_dim, (head_dim - plain_dim) // 2
    plain, rotary = rows.view(heads, head_dim, *rows.shape[1:]).tensor_split((plain_dim,), 1)
    split = rotary.reshape(heads, 2, pairs, *rows.shape[1:]).transpose(1, 2).reshape(rotary.shape)
    return torch.cat((plain, split), 1).view(rows.shape)


class RotaryTable:
    """Turns positions into rotations. The table is computed once, in float32 as checkpoints expect."""

    def __init__(self, spec: RopeSpec, head_dim: int, context_len: int, device: torch.device) -> None:
        positions_P = torch.arange(context_len, device=device).float()
        angles_PC = torch.outer(positions_P, rotary_frequencies(spec, head_dim).to(device))
        lengths_PC = torch.full_like(angles_PC, spec.attention_factor)
        self.rotations_P1C = torch.polar(lengths_PC, angles_PC)[:, None].contiguous()

    def rotations(self, positions_N: Tensor) -> Tensor:
        """Complex numbers [N, 1, C], as long as YaRN's attention factor; the middle dimension is for heads."""
        return self.rotations_P1C.index_select(0, positions_N)


def rotate_(x_NHD: Tensor, rotations_N1C: Tensor) -> None:
    """Rotates in place. Each head must be dense; N and H may be strided."""
    pairs = (*x_NHD.shape[:-1], x_NHD.shape[-1] // 2, 2)
    if x_NHD.dtype == torch.float32:
        torch.view_as_complex(x_NHD.view(pairs)).mul_(rotations_N1C)
        return
    wide_NHC = torch.view_as_complex(x_NHD.float().view(pairs))
    x_NHD.copy_(torch.view_as_real(wide_NHC.mul_(rotations_N1C)).flatten(-2))
