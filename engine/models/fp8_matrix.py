"""A matrix that is held in fp8, with its scales.

Legend: O output features, I input features, B blocks of input features that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.models.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """`values_OI` in float8_e4m3fn; `scales_OB` in float32, where a row has a scale for each `columns` inputs."""

    values_OI: Tensor
    scales_OB: Tensor
    columns: int

    def multiplied(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I], multiplied in float32 and rounded once."""
        inputs = self.values_OI.shape[1]
        each_OI = self.scales_OB.repeat_interleave(self.columns, 1)[:, :inputs]
        return (self.values_OI.to(torch.float32) * each_OI).to(dtype)

    def to(self, device: torch.device) -> Fp8Matrix:
        return Fp8Matrix(self.values_OI.to(device), self.scales_OB.to(device), self.columns)

    def rearranged(self, rows: Callable[[Tensor], Tensor]) -> Fp8Matrix:
        """`rows` puts rows in another order, whatever they hold. It gets the values as bytes."""
        values_OI = rows(self.values_OI.view(torch.uint8)).view(self.values_OI.dtype)
        return Fp8Matrix(values_OI, rows(self.scales_OB), self.columns)


def stack_fp8(parts: Sequence[Fp8Matrix]) -> Fp8Matrix | None:
    """One matrix with the rows of all; None if their blocks differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(
        (part.columns, part.scales_OB.shape[1]) != (first.columns, first.scales_OB.shape[1]) for part in parts
    ):
        return None
    values_OI = torch.cat([part.values_OI.view(torch.uint8) for part in parts])
    scales_OB = torch.cat([part.scales_OB for part in parts])
    return Fp8Matrix(values_OI.view(first.values_OI.dtype), scales_OB, first.columns)


@runtime_checkable
class Fp8Source(Protocol):
    """A WeightSource that can also return matrices as they are stored."""

    def take_fp8(self, name: str) -> Fp8Matrix | None:
        """None if this matrix is not stored in fp8."""


@runtime_checkable
class Fp8Linears(Protocol):
    """A LinearFactory that can also multiply with matrices held in fp8."""

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None, /) -> Linear: ...

    def fp8(self, matrix: Fp8Matrix, bias_O: Tensor | None, /) -> Linear: ...
