"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention.interface import AttentionStep


class CausalModel(Protocol):
    """A causal language model over paged KV.

    Legend: N tokens of all requests in a step one after another, E hidden size, V vocabulary, R chosen rows.
    """

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep) -> Tensor:
        """Last hidden states [N, E]; `attend` writes the KV of these tokens on the way."""

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Scores of the next token [R, V], in the type of the activations or in float32."""
