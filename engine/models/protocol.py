"""What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The next `count` rows of a step have this adapter; "" is none."""

    adapter: str
    count: int


@runtime_checkable
class AdaptedModel(CausalModel, Protocol):
    """A CausalModel whose rows may have adapters (engine/models/adapters.py)."""

    def forward_adapted(
        self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep, rows: Sequence[AdapterRows]
    ) -> Tensor:
        """The same as `forward`, each row with its adapter."""
