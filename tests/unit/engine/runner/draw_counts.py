"""Whether draws follow a distribution."""

from __future__ import annotations

import math
from collections import Counter

import torch


def chi_square(counts: Counter[int], probs: torch.Tensor) -> float:
    """The standardised chi-square statistic. It is about normal(0, 1) if the draws follow `probs`. Tokens of
    probability 0 must not occur."""
    kept = [token for token in range(len(probs)) if probs[token] > 0]
    assert set(counts) <= set(kept)
    total = sum(counts.values())
    statistic = sum((counts[t] - total * float(probs[t])) ** 2 / (total * float(probs[t])) for t in kept)
    freedom = len(kept) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)
