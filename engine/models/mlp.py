"""The second half of a decoder layer: one gated MLP, or experts of which a router chooses some for each token.

Legend: N tokens, E hidden size, X experts, K experts that a token has, M tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """down(silu(gate) * up); `gated` is all but `down`."""

    gated: Linear
    down: Linear

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.down(self.gated(x_NE))


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The sum of the `top_k` experts that the router scores highest for a token, by the softmax of the scores; with
    `norm_topk` their weights sum to one. As in Qwen3-MoE (Yang et al. 2025).

    The host reads which experts have tokens, so a GPU waits for it.
    """

    router: Linear
    mlps: Sequence[GatedMlp]
    top_k: int
    norm_topk: bool

    def __call__(self, x_NE: Tensor) -> Tensor:
        weights_NK, chosen_NK = self._route(x_NE)
        sum_NE = torch.zeros_like(x_NE)
        for expert in sorted(set(chosen_NK.flatten().tolist())):
            tokens_M, places_M = torch.where(chosen_NK == expert)
            part_ME = self.mlps[expert](x_NE[tokens_M])
            sum_NE.index_add_(0, tokens_M, part_ME * weights_NK[tokens_M, places_M, None])
        return sum_NE

    def _route(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts."""
        shares_NX = torch.softmax(self.router(x_NE), -1, dtype=torch.float32)
        weights_NK, chosen_NK = shares_NX.topk(self.top_k, -1)
        if self.norm_topk:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return weights_NK.to(x_NE.dtype), chosen_NK
