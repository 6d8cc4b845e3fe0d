"""Checkpoints whose matrices are stored in fp8: which formats are read, and the numbers that they stand for.

A weight is its fp8 number times a scale, which it shares with its matrix, its row or a block of the matrix. This is
multiplied out when the model is loaded, in float32, and rounded once to the dtype that the model is held in, unless
matrices are kept in fp8 (by `keep_fp8` on a GPU, engine/models/fp8_linear.py; by the compiled kernels of a CPU,
engine/cpu/matrix.py). Activations stay as they are: that the checkpoint would have them quantised, too, is not
followed, which is nearer to the model that was quantised. Multiplied out, a model takes as much memory as one that was
stored in 16 bits.

Two formats are read: `fp8`, as of DeepSeek, Qwen and transformers (`weight_scale_inv` by block, or `weight_scale`), and
`compressed-tensors` with `float-quantized` weights, as of llm-compressor (`weight_scale`).

Legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.models.errors import UnsupportedModel
from engine.models.quantized_matrix import QuantizedMatrix

STORED = "F8_E4M3"
"""What safetensors calls float8_e4m3fn."""

SCALES = ("weight_scale_inv", "weight_scale")
"""Both are factors; the first name is DeepSeek's."""

UNREAD = ("input_scale",)
"""For activations, which stay as they are."""

FORMATS = (
    "FP8 weights (quant_method fp8, or compressed-tensors with format float-quantized) are read, and packed integers"
    " (gptq, awq, or compressed-tensors with format pack-quantized)"
)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """`block`: output and input features of a block that shares a scale; None if no scale is for a block."""

    block: tuple[int, int] | None

    def fits(self, scale: Sequence[int], weight: Sequence[int]) -> bool:
        """Whether scales of this shape are for a matrix [O, I]."""
        outputs, inputs = weight
        whole_or_rows = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        return tuple(scale) in whole_or_rows or tuple(scale) == self._blocks(outputs, inputs)

    def kept(self, weight_OI: Tensor, scale: Tensor) -> QuantizedMatrix:
        """The matrix in fp8; each row has its own scales."""
        outputs, inputs = weight_OI.shape
        scale = scale.to(torch.float32)
        if scale.numel() == 1:
            return QuantizedMatrix(weight_OI, scale.reshape(1, 1).repeat(outputs, 1), inputs)
        if scale.shape[1:].numel() == 1 and len(scale) == outputs:
            return QuantizedMatrix(weight_OI, scale.reshape(outputs, 1).contiguous(), inputs)
        assert self.block is not None
        rows, columns = self.block
        scales_OB = scale.repeat_interleave(rows, 0)[:outputs].contiguous()
        return QuantizedMatrix(weight_OI, scales_OB, columns if scales_OB.shape[1] > 1 else inputs)

    def _blocks(self, outputs: int, inputs: int) -> tuple[int, int] | None:
        if self.block is None:
            return None
        return -(-outputs // self.block[0]), -(-inputs // self.block[1])


def parse_fp8(config: Mapping[str, Any]) -> Fp8Format | None:
    """The format that config.json's `quantization_config` describes; None if it has none. Raises UnsupportedModel that
    names what is not read."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise UnsupportedModel("quantization_config must be an object")
    method = found.get("quant_method")
    if method == "fp8":
        if found.get("fmt", "e4m3") != "e4m3":
            raise UnsupportedModel(f"quantization_config: fmt {found['fmt']!r} is not read, only e4m3 is")
        return Fp8Format(_block(found.get("weight_block_size"), "weight_block_size"))
    if method == "compressed-tensors":
        return _compressed(found)
    raise UnsupportedModel(f"quantization_config: quant_method {method!r} is not implemented; {FORMATS}")


def _compressed(found: Mapping[str, Any]) -> Fp8Format:
    kind = found.get("format")
    groups = found.get("config_groups")
    if kind not in ("float-quantized", "naive-quantized") or not isinstance(groups, dict) or not groups:
        raise UnsupportedModel(f"quantization_config: format {kind!r} is not implemented; {FORMATS}")
    blocks = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise UnsupportedModel(
                f"quantization_config: weights of {name} are not 8-bit floats: {weights}; {FORMATS}"
            )
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise UnsupportedModel(f"quantization_config: strategy {strategy!r} of {name} is not implemented")
        blocks.add(_block(weights.get("block_structure"), "block_structure") if strategy == "block" else None)
    blocks.discard(None)
    if len(blocks) > 1:
        raise UnsupportedModel(f"quantization_config: blocks of several sizes are not implemented: {blocks}")
    return Fp8Format(blocks.pop() if blocks else None)


def _block(found: object, key: str) -> tuple[int, int] | None:
    if found is None:
        return None
    if (
        isinstance(found, list | tuple)
        and len(found) == 2
        and all(type(each) is int and each > 0 for each in found)
    ):
        return found[0], found[1]
    raise UnsupportedModel(f"quantization_config: {key} must be two positive integers, not {found!r}")
