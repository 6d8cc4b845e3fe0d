"""A matrix that is held as it is stored: in fp8, in fp4, or in integers of 4 or 8 bits, with its scales.

Legend: O output features, I input features, B blocks of input features that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.models.linear import Linear

FP8 = torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes of e2m1 are."""

Kind = Literal["fp8", "fp4", "int8", "int4"]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A weight is (value - zero) * scale. `values_OI` are in float8_e4m3fn or float4_e2m1fn_x2, without zeros, or
    integers of `bits` in uint8, with `zeros_OB` in uint8. Those in fp4 are two to a byte, the first in the lower half,
    and their scales are powers of two. `scales_OB` are in float32. A row has a scale for each `columns` inputs."""

    values_OI: Tensor
    scales_OB: Tensor
    columns: int
    zeros_OB: Tensor | None = None
    bits: int = 8

    @property
    def group(self) -> int:
        """Inputs of the first group; the last may have fewer."""
        return min(self.columns, self.inputs)

    @property
    def inputs(self) -> int:
        return self.values_OI.shape[1] * (2 if self.kind == "fp4" else 1)

    @property
    def kind(self) -> Kind:
        if self.values_OI.dtype == FP8:
            return "fp8"
        if self.values_OI.dtype == FP4:
            return "fp4"
        return "int4" if self.bits == 4 else "int8"

    def multiplied(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I], multiplied in float32 and rounded once."""
        values_OI = self._unpacked() if self.kind == "fp4" else self.values_OI.to(torch.float32)
        if self.zeros_OB is not None:
            values_OI -= self._of_each(self.zeros_OB).to(torch.float32)
        return (values_OI * self._of_each(self.scales_OB)).to(dtype)

    def _unpacked(self) -> Tensor:
        codes_OI2 = self.values_OI.view(torch.uint8).int()[..., None]
        numbers = torch.tensor(FP4_NUMBERS, device=codes_OI2.device)
        return numbers[torch.cat((codes_OI2 & 15, codes_OI2 >> 4), -1)].flatten(1)

    def to(self, device: torch.device) -> QuantizedMatrix:
        return self._with(lambda tensor: tensor.to(device))

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Outputs start .. stop-1."""
        return self._with(lambda tensor: tensor[start:stop])

    def rearranged(self, rows: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        """`rows` puts rows in another order, whatever they hold. It gets the values as bytes."""
        return self._with(lambda tensor: as_bytes(rows, tensor))

    def _of_each(self, blocks_OB: Tensor) -> Tensor:
        """[O, I], or [O, 1] where a row has one."""
        if blocks_OB.shape[1] == 1:
            return blocks_OB
        return blocks_OB.repeat_interleave(self.columns, 1)[:, : self.inputs]

    def _with(self, change: Callable[[Tensor], Tensor]) -> QuantizedMatrix:
        zeros_OB = None if self.zeros_OB is None else change(self.zeros_OB)
        return QuantizedMatrix(
            change(self.values_OI), change(self.scales_OB), self.columns, zeros_OB, self.bits
        )


def as_bytes(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Few operators of torch support fp8, and none fp4."""
    narrow = tensor.dtype in (FP8, FP4)
    return change(tensor.view(torch.uint8)).view(tensor.dtype) if narrow else change(tensor)


def stack_quantized(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
    """One matrix with the rows of all; None if their kinds or blocks differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(part.kind, part.columns, part.scales_OB.shape[1]) for part in parts}) > 1:
        return None
    zeros = [part.zeros_OB for part in parts if part.zeros_OB is not None]
    values_OI = torch.cat([part.values_OI.view(torch.uint8) for part in parts])
    return QuantizedMatrix(
        values_OI.view(first.values_OI.dtype),
        torch.cat([part.scales_OB for part in parts]),
        first.columns,
        torch.cat(zeros) if zeros else None,
        first.bits,
    )


@runtime_checkable
class QuantizedSource(Protocol):
    """A WeightSource that can also return matrices as they are stored."""

    def take_quantized(self, name: str) -> QuantizedMatrix | None:
        """None if this matrix is stored otherwise, or cannot be held so."""


@runtime_checkable
class QuantizedLinears(Protocol):
    """A LinearFactory that can also multiply with some matrices held as they are stored."""

    def __call__(self, weight_OI: Tensor | QuantizedMatrix, bias_O: Tensor | None, /) -> Linear: ...

    def keeps(self, matrix: QuantizedMatrix, /) -> bool: ...


@runtime_checkable
class QuantizedGatedLinears(QuantizedLinears, Protocol):
    """The same of GatedLinears."""

    def gated(self, gate_up_OI: Tensor | QuantizedMatrix, bias_O: Tensor | None, /) -> Linear: ...
