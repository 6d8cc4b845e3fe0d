"""Matrix products with fixed weights. The model does not know how they are stored.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """y_NO = x_NI @ weight_OI.T + bias_O, in the dtype of x."""

    def __call__(self, x_NI: Tensor) -> Tensor: ...


LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""Takes weight_OI and bias_O, which it may keep."""


class PlainLinear:
    """The reference: one call of torch's own linear."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self._weight_OI, self._bias_O)


class CastingLinear:
    """Weights narrower than the activations: rows are rounded to the weights' dtype and widened again after."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        y_NO = F.linear(x_NI.to(self._weight_OI.dtype), self._weight_OI, self._bias_O)
        return y_NO.to(x_NI.dtype)


def linear_factory(weights: torch.dtype, activations: torch.dtype) -> LinearFactory:
    """The fastest kind of linear for where and how the model is held."""
    if weights == activations:
        return PlainLinear
    return CastingLinear
