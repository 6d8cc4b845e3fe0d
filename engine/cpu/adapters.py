"""Adapters packed for the compiled kernels, and which rows of a step have which.

Of matrices that are fused in a layer, the updates are fused, too: `a` has the parts' rows one after another, and `b`
their columns, each with zeros in the outputs of the other parts.

Legend: I inputs of a matrix, O outputs, W the ranks of a fused matrix's parts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cpu.library import FLOAT32, AdaptersC, MatrixC, UpdateC
from engine.cpu.matrix import PackedLinears, PackedMatrix
from engine.models.adapters import Adapter, MatrixUpdate
from engine.models.config import ModelSpec
from engine.models.layers import interleave_rotary
from engine.models.protocol import AdapterRows
from engine.models.tensor_shapes import tensor_shapes


class Target(NamedTuple):
    """Matrices that are fused in a layer. Of the first `num_rotary`, heads are rotated."""

    parts: tuple[str, ...]
    num_rotary: int = 0
    gated: bool = False


TARGETS = (
    Target(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), num_rotary=2),
    Target(("self_attn.o_proj",)),
    Target(("mlp.gate_proj", "mlp.up_proj"), gated=True),
    Target(("mlp.down_proj",)),
)
"""In the order of adapters.h."""


class PackedAdapters:
    """A decoder's adapters. Number 0 is the model as it is."""

    def __init__(self, adapters: Sequence[Adapter], spec: ModelSpec, linears: PackedLinears) -> None:
        self._spec = spec
        self._linears = linears
        self._shapes = tensor_shapes(spec)
        self._numbers = {adapter.name: number for number, adapter in enumerate(adapters, 1)}
        self._matrices: list[PackedMatrix] = []
        places = [
            (updates, layer, target)
            for updates in ({}, *(adapter.updates for adapter in adapters))
            for layer in range(spec.num_layers)
            for target in TARGETS
        ]
        self._updates = (UpdateC * len(places))(*(self._packed(*place) for place in places))

    def of_rows(self, rows: Sequence[AdapterRows]) -> AdaptersC:
        """Describes a step's rows. Points into this object."""
        first = (c_int32 * (len(rows) + 1))(0, *accumulate(each.count for each in rows))
        whose = (c_int32 * len(rows))(*(self._numbers[each.adapter] if each.adapter else 0 for each in rows))
        return AdaptersC(addressof(self._updates), first, whose, len(rows), self._spec.num_layers)

    def _packed(self, updates: Mapping[str, MatrixUpdate], layer: int, target: Target) -> UpdateC:
        parts = _parts(updates, layer, target)
        shapes = [self._shapes.get(f"{_module(layer, part)}.weight", (0, 0)) for part in target.parts]
        if not parts:
            return UpdateC(_nothing(shapes[0][1]), _nothing(0))
        width = sum(len(update.a_RI) for update in parts.values())
        a_WI = torch.zeros(width, shapes[0][1])
        b_OW = torch.zeros(sum(outputs for outputs, _ in shapes), width)
        row = column = 0
        for index, (part, (outputs, _)) in enumerate(zip(target.parts, shapes, strict=True)):
            if (update := parts.get(part)) is not None:
                rank, b_OR = len(update.a_RI), update.b_OR.float()
                a_WI[column : column + rank] = update.a_RI
                if index < target.num_rotary:
                    b_OR = interleave_rotary(b_OR, self._spec.head_dim)
                b_OW[row : row + outputs, column : column + rank] = b_OR
                column += rank
            row += outputs
        b = self._matrix(b_OW, gated=target.gated)
        b.rounds = False
        return UpdateC(self._matrix(a_WI), b)

    def _matrix(self, weight_OI: Tensor, *, gated: bool = False) -> MatrixC:
        """Packed, and kept alive."""
        self._matrices.append(self._linears(weight_OI, None, paired=gated))
        return self._matrices[-1].matrix


def _parts(updates: Mapping[str, MatrixUpdate], layer: int, target: Target) -> dict[str, MatrixUpdate]:
    named = ((part, updates.get(_module(layer, part))) for part in target.parts)
    return {part: update for part, update in named if update is not None}


def _module(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}"


def _nothing(inputs: int) -> MatrixC:
    """A matrix without outputs."""
    return MatrixC(None, None, FLOAT32, 0, inputs, False, False, 0)
