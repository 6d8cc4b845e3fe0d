"""Checkpoints whose experts are stored in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS's are.

A weight is a number of 4 bits (e2m1), two to a byte, the first in the lower half, times a power of two that 32 inputs
share, of which a byte has the exponent (e8m0). All of a layer's experts are one tensor. The compiled kernels of a CPU
multiply with the numbers as they are stored; elsewhere they are multiplied out, which float32 and bfloat16 do without
loss.

Legend: X experts, O output features, I input features, B blocks of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.models.errors import UnsupportedModel
from engine.models.quantized_matrix import FP4, QuantizedMatrix

BLOCK = 32
"""Inputs that share a scale."""

EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """How the tensors [X, I, O] of a layer's experts are stored."""

    fields: ClassVar[frozenset[str]] = frozenset({"_blocks", "_scales"})
    needed: ClassVar[frozenset[str]] = fields
    dtypes: ClassVar[Mapping[str, str]] = dict.fromkeys(fields, "U8")

    def shapes(self, experts: int, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """What the tensors of a layer's experts look like. Raises UnsupportedModel if they cannot be stored so."""
        if inputs % BLOCK:
            raise UnsupportedModel(
                f"quantization_config: {inputs} inputs are no multiple of mxfp4's blocks of {BLOCK}"
            )
        blocks = inputs // BLOCK
        return {"_blocks": (experts, outputs, blocks, BLOCK // 2), "_scales": (experts, outputs, blocks)}

    def multiplied(self, stored: Mapping[str, Tensor], experts: int, inputs: int, outputs: int) -> Tensor:
        """The weights [X, I, O] in float32."""
        return by_expert(self.kept(stored, experts, inputs, outputs).multiplied(torch.float32), experts)

    def kept(self, stored: Mapping[str, Tensor], experts: int, inputs: int, outputs: int) -> QuantizedMatrix:
        """The same as they are stored: the outputs of all experts, one expert after another, [X * O, I]."""
        rows = experts * outputs
        values_OI = stored["_blocks"].view(rows, inputs // 2).view(FP4)
        exponents_OB = stored["_scales"].view(rows, -1).int() - EXPONENT_BIAS
        ones_OB = torch.ones_like(exponents_OB, dtype=torch.float32)
        return QuantizedMatrix(values_OI, torch.ldexp(ones_OB, exponents_OB), BLOCK)


def by_expert(weight_OI: Tensor, experts: int) -> Tensor:
    """The outputs of all experts, one expert after another, as a plain checkpoint has them: [X, I, O]."""
    return weight_OI.view(experts, -1, weight_OI.shape[1]).transpose(1, 2)


def parse_mxfp4(config: Mapping[str, Any]) -> Mxfp4Format | None:
    """None if config.json has no quantization_config. Raises UnsupportedModel that names another format."""
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method != "mxfp4":
        raise UnsupportedModel(
            f"quantization_config: {method!r} of such experts is not implemented, mxfp4 is"
        )
    return Mxfp4Format()
