"""The second half of a decoder layer: one gated MLP, or experts of which a router chooses some for each token.

Legend: N tokens, E hidden size, X experts, G groups of them, K experts that a token has, M tokens of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.experts_config import Routing
from engine.models.linear import Linear

SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoids before it divides them."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """down(silu(gate) * up); `gated` is all but `down`."""

    gated: Linear
    down: Linear

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.down(self.gated(x_NE))


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weighted sum of the experts that `routing` chooses for a token by the scores of `router`, and of `shared`,
    which every token has. As in Qwen3-MoE (Yang et al. 2025) and in DeepSeek-V2 and V3.

    The host reads which experts have tokens, so a GPU waits for it.
    """

    router: Linear
    mlps: Sequence[GatedMlp]
    routing: Routing
    correction_X: Tensor | None = None
    shared: GatedMlp | None = None

    def __call__(self, x_NE: Tensor) -> Tensor:
        weights_NK, chosen_NK = self._route(x_NE)
        sum_NE = torch.zeros_like(x_NE) if self.shared is None else self.shared(x_NE)
        for expert in sorted(set(chosen_NK.flatten().tolist())):
            tokens_M, places_M = torch.where(chosen_NK == expert)
            part_ME = self.mlps[expert](x_NE[tokens_M])
            sum_NE.index_add_(0, tokens_M, part_ME * weights_NK[tokens_M, places_M, None])
        return sum_NE

    def _route(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of each token's experts."""
        routing, scores_NX = self.routing, self.router(x_NE).float()
        shares_NX = scores_NX.sigmoid() if routing.sigmoid else torch.softmax(scores_NX, -1)
        choice_NX = shares_NX if self.correction_X is None else shares_NX + self.correction_X
        if routing.groups > 1:
            choice_NX = self._in_best_groups(choice_NX)
        chosen_NK = choice_NX.topk(routing.top_k, -1).indices
        weights_NK = shares_NX.gather(-1, chosen_NK)
        if routing.norm_topk:
            sum_N1 = weights_NK.sum(-1, keepdim=True)
            weights_NK = weights_NK / (sum_N1 + SMALLEST_SUM if routing.sigmoid else sum_N1)
        return (weights_NK * routing.factor).to(x_NE.dtype), chosen_NK

    def _in_best_groups(self, choice_NX: Tensor) -> Tensor:
        """-inf for experts of other groups."""
        choice_NGX = choice_NX.view(len(choice_NX), self.routing.groups, -1)
        goodness_NG = choice_NGX.topk(2 if self.routing.sigmoid else 1, -1).values.sum(-1)
        open_NG = goodness_NG.topk(self.routing.top_groups, -1).indices
        closed_NG = torch.ones_like(goodness_NG, dtype=torch.bool).scatter_(-1, open_NG, False)
        return choice_NGX.masked_fill(closed_NG[..., None], -torch.inf).flatten(1)
