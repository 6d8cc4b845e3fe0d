"""GPT-OSS's experts: a checkpoint has those of a layer in one tensor for each product, with biases, and gate and up of
an expert take turns.

Legend: X experts, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.models.clamped_swiglu import ClampedSwiglu
from engine.models.linear import ActivatedLinear, Linear, LinearFactory
from engine.models.mlp import GatedMlp
from engine.models.quantized_matrix import QuantizedLinears, QuantizedMatrix, QuantizedSource
from engine.models.weights import WeightSource


@runtime_checkable
class ClampedLinears(QuantizedLinears, Protocol):
    """A LinearFactory that can also fuse the first product of such an expert with its activation."""

    def clamped(
        self, gate_up_OI: Tensor | QuantizedMatrix, bias_O: Tensor, activation: ClampedSwiglu, /
    ) -> Linear:
        """O / 2 features wide; the gate is the first half of the outputs."""


class StackedExperts:
    """Reads the experts of the layer whose names begin with `prefix`. Matrices stay quantized if they are stored so and
    the products keep them."""

    def __init__(
        self, source: WeightSource, prefix: str, make_linear: LinearFactory, device: torch.device
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._make_linear = make_linear
        self._device = device

    def mlps(self, count: int, activation: ClampedSwiglu) -> list[GatedMlp]:
        parts = zip(
            self._matrices("gate_up_proj", count, _halves),
            self._biases("gate_up_proj_bias"),
            self._matrices("down_proj", count, Tensor.contiguous),
            self._biases("down_proj_bias"),
            strict=True,
        )
        return [
            GatedMlp(
                self._gated(gate_up_OI, _halves(gate_up_bias_O), activation),
                self._product(down_OI, down_bias_O),
            )
            for gate_up_OI, gate_up_bias_O, down_OI, down_bias_O in parts
        ]

    def _gated(
        self, gate_up_OI: Tensor | QuantizedMatrix, bias_O: Tensor, activation: ClampedSwiglu
    ) -> Linear:
        if isinstance(self._make_linear, ClampedLinears):
            return self._make_linear.clamped(self._held(gate_up_OI, bias_O), bias_O, activation)
        return ActivatedLinear(self._product(gate_up_OI, bias_O), activation)

    def _product(self, weight_OI: Tensor | QuantizedMatrix, bias_O: Tensor) -> Linear:
        held_OI = self._held(weight_OI, bias_O)
        if isinstance(held_OI, QuantizedMatrix):
            assert isinstance(self._make_linear, QuantizedLinears), "others do not keep them"
            return self._make_linear(held_OI, bias_O)
        return self._make_linear(held_OI, bias_O)

    def _held(self, weight_OI: Tensor | QuantizedMatrix, bias_O: Tensor) -> Tensor | QuantizedMatrix:
        """Biases have the dtype that the model is held in."""
        if isinstance(weight_OI, Tensor):
            return weight_OI
        if isinstance(self._make_linear, QuantizedLinears) and self._make_linear.keeps(weight_OI):
            return weight_OI
        return weight_OI.multiplied(bias_O.dtype)

    def _matrices(
        self, name: str, count: int, arranged: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor | QuantizedMatrix]:
        """[O, I] of each expert, with its rows `arranged`."""
        name = self._prefix + name
        whole = self._source.take_quantized(name) if isinstance(self._source, QuantizedSource) else None
        if whole is None:
            for weight_IO in self._source.take(name).to(self._device):
                yield arranged(weight_IO.t())
            return
        whole, outputs = whole.to(self._device), len(whole.values_OI) // count
        for expert in range(count):
            yield whole.rows(expert * outputs, (expert + 1) * outputs).rearranged(arranged)

    def _biases(self, name: str) -> Tensor:
        """[X, O]"""
        return self._source.take(self._prefix + name).to(self._device)


def _halves(rows: Tensor) -> Tensor:
    """Gates before ups."""
    return torch.cat([rows[0::2], rows[1::2]])
