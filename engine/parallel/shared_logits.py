"""A small model that every rank holds whole, such as a draft model. Sums between ranks would take longer than its
products.

Legend: N tokens, R rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from engine.attention.interface import AttentionStep
from engine.models.protocol import CausalModel
from engine.parallel.ranks import RankGroup


class SharedLogits:
    """A CausalModel. All ranks get rank 0's logits, so they draw the same conclusions whatever their own arithmetic
    gives."""

    def __init__(self, model: CausalModel, ranks: RankGroup) -> None:
        self._model = model
        self._ranks = ranks

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep) -> Tensor:
        return self._model.forward(tokens_N, positions_N, attend)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        logits_RV = self._model.logits(hidden_RE).contiguous()
        self._ranks.share_(logits_RV)
        return logits_RV
