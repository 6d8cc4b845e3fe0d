"""The activation of GPT-OSS's experts.

Legend: N tokens, F inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), where gate is at most `limit`, and up between -limit and limit (OpenAI
    2025, gpt-oss model card)."""

    alpha: float
    limit: float

    def __call__(self, gate_up_N2F: Tensor) -> Tensor:
        """[N, F]; gate is the first half of each row."""
        gate_NF, up_NF = gate_up_N2F.chunk(2, -1)
        gate_NF = gate_NF.clamp(max=self.limit)
        up_NF = up_NF.clamp(-self.limit, self.limit)
        return gate_NF * torch.sigmoid(gate_NF * self.alpha) * (up_NF + 1)
