"""Checkpoints whose matrices are stored in integers of 4 or 8 bits, several to a word of 32: which formats are read,
and the numbers that they stand for.

A weight is (integer - zero) * scale, with a zero and a scale for each group of inputs of an output. The compiled
kernels of a CPU multiply with the integers as they are stored (engine/cpu/matrix.py). Elsewhere, and where groups are
not one after another, this is multiplied out when the model is loaded, in float32, which is exact for scales of 16
bits, and rounded once to the dtype that the model is held in. Activations stay as they are.

Three formats are read, as their packers write them: `gptq` (AutoGPTQ, GPTQModel), `awq` (AutoAWQ's version `gemm`) and
`compressed-tensors` with `pack-quantized` weights (llm-compressor).

Legend: O output features, I input features, G groups of inputs, P integers of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from engine.models.config_values import truth
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.quantized_matrix import QuantizedMatrix

PackedMethod = Literal["gptq", "awq", "compressed-tensors"]

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of a word's integers is the first output, the second, and so on."""

FIELDS: Mapping[PackedMethod, tuple[frozenset[str], frozenset[str]]] = {
    "gptq": (frozenset({"qweight", "qzeros", "scales"}), frozenset({"g_idx"})),
    "awq": (frozenset({"qweight", "qzeros", "scales"}), frozenset()),
    "compressed-tensors": (
        frozenset({"weight_packed", "weight_scale"}),
        frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"}),
    ),
}
"""The tensors that stand for a matrix `weight`: those that each has, and those that some have."""

ORDER: Mapping[PackedMethod, str] = {"gptq": "g_idx", "compressed-tensors": "weight_g_idx"}
"""The tensor with the group of each input, where groups are not one after another."""

WORDS = frozenset({"qweight", "qzeros", "weight_packed", "weight_zero_point"})
"""Those of words, int32."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """`group` inputs share a zero and a scale, all of them if it is None. `zeros_are_less_one`: zeros are stored one
    too small (AutoGPTQ's first format). Without `has_zeros` the zero is half the range, whatever is stored: packers of
    symmetric gptq did not agree on that. `ordered`: each matrix says which group an input belongs to."""

    method: PackedMethod
    bits: int
    group: int | None
    zeros_are_less_one: bool = False
    has_zeros: bool = True
    ordered: bool = False
    dtypes: ClassVar[Mapping[str, str]] = dict.fromkeys(WORDS, "I32")
    """Of the tensors whose type matters, as safetensors calls them."""

    @property
    def needed(self) -> frozenset[str]:
        """The tensors that every matrix has."""
        needed, _ = FIELDS[self.method]
        if self.method == "compressed-tensors" and self.has_zeros:
            needed |= {"weight_zero_point"}
        return needed | {ORDER[self.method]} if self.ordered else needed

    @property
    def fields(self) -> frozenset[str]:
        """All tensors that a matrix may have."""
        needed, optional = FIELDS[self.method]
        return needed | optional

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """What the tensors of a matrix [O, I] look like. Raises UnsupportedModel if it cannot be stored so."""
        per_word = WORD_BITS // self.bits
        groups = 1 if self.group is None else -(-inputs // self.group)
        if self.method == "compressed-tensors":
            return {
                "weight_packed": (outputs, -(-inputs // per_word)),
                "weight_scale": (outputs, groups),
                "weight_zero_point": (-(-outputs // per_word), groups),
                "weight_shape": (2,),
                "weight_g_idx": (inputs,),
            }
        if outputs % per_word or inputs % per_word:
            raise UnsupportedModel(
                f"quantization_config: {outputs} x {inputs} weights cannot be packed as {self.method}"
            )
        rows, columns = (
            (inputs // per_word, outputs) if self.method == "gptq" else (inputs, outputs // per_word)
        )
        return {
            "qweight": (rows, columns),
            "qzeros": (groups, outputs // per_word),
            "scales": (groups, outputs),
            "g_idx": (inputs,),
        }

    def multiplied(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """The weights [O, I] in float32. `stored` has the tensors by their field, in the shapes of `shapes`. Raises
        BadCheckpoint."""
        matrix, order_I = self._matrix(stored, outputs, inputs), self._order(stored, inputs)
        if order_I is None:
            return matrix.multiplied(torch.float32)
        assert matrix.zeros_OB is not None
        offsets_OI = matrix.values_OI.float() - matrix.zeros_OB.float()[:, order_I]
        return offsets_OI * matrix.scales_OB[:, order_I]

    def kept(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedMatrix | None:
        """The same as integers; None if groups are not one after another. Raises BadCheckpoint."""
        return self._matrix(stored, outputs, inputs) if self._order(stored, inputs) is None else None

    def _matrix(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedMatrix:
        """As if groups were one after another."""
        if self.method == "compressed-tensors":
            values_OI, zeros_OG = self._compressed(stored, outputs, inputs)
            scales_OG = stored["weight_scale"]
        else:
            values_OI, zeros_OG = self._words(stored)
            scales_OG = stored["scales"].t()
        if zeros_OG is None:
            zeros_OG = torch.full_like(scales_OG, 2 ** (self.bits - 1))
        return QuantizedMatrix(
            values_OI.to(torch.uint8).contiguous(),
            scales_OG.float().contiguous(),
            self.group or inputs,
            zeros_OG.to(torch.uint8).contiguous(),
            self.bits,
        )

    def _compressed(
        self, stored: Mapping[str, Tensor], outputs: int, inputs: int
    ) -> tuple[Tensor, Tensor | None]:
        """Values [O, I], and zeros [O, G] if there are any."""
        values_OI = unpacked(stored["weight_packed"], self.bits)[:, :inputs]
        if not self.has_zeros:
            return values_OI, None
        return values_OI, unpacked(stored["weight_zero_point"].t(), self.bits).t()[:outputs]

    def _words(self, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The same of gptq, which packs inputs, and awq, which packs outputs. Both pack the zeros of outputs."""
        qweight, qzeros = stored["qweight"], stored["qzeros"]
        if self.method == "awq":
            return in_order(unpacked(qweight, self.bits).t()), in_order(unpacked(qzeros, self.bits).t())
        values_OI = unpacked(qweight.t(), self.bits)
        if not self.has_zeros:
            return values_OI, None
        if self.zeros_are_less_one:
            qzeros = qzeros + every_one(self.bits)
        return values_OI, unpacked(qzeros, self.bits).t()

    def _order(self, stored: Mapping[str, Tensor], inputs: int) -> Tensor | None:
        """Each input's group; None if one comes after another. llm-compressor writes an order of -1 then."""
        order_I = stored.get(ORDER.get(self.method, ""))
        if order_I is None or bool((order_I == -1).all()):
            return None
        in_turn_I = torch.arange(inputs, device=order_I.device) // (self.group or inputs)
        if torch.equal(order_I.long(), in_turn_I):
            return None
        groups = int(in_turn_I[-1]) + 1
        if not 0 <= int(order_I.min()) <= int(order_I.max()) < groups:
            raise BadCheckpoint(f"g_idx names a group beyond the {groups} that there are")
        return order_I.long()


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Integers [.., W * P] of words [.., W] of int32, the lowest bits of a word first."""
    shifts_P = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    values_P: Tensor = words[..., None] >> shifts_P & (2**bits - 1)
    return values_P.flatten(-2)


def every_one(bits: int) -> int:
    """A word whose integers are all one. GPTQModel takes it from whole words, so a zero of 0 borrows from the next."""
    return sum(1 << shift for shift in range(0, WORD_BITS, bits))


def in_order(rows_O: Tensor) -> Tensor:
    """AWQ's rows in the order of outputs."""
    by_word = rows_O.reshape(-1, len(AWQ_ORDER), *rows_O.shape[1:])
    return by_word[:, AWQ_ORDER].flatten(0, 1)


def parse_packed(config: Mapping[str, Any]) -> PackedFormat | None:
    """The format that config.json's `quantization_config` describes; None if it is another. Raises UnsupportedModel
    that names what is not read."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    method = found.get("quant_method")
    if method == "gptq":
        return _gptq(found)
    if method == "awq":
        return _awq(found)
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        return _compressed(found)
    return None


def _gptq(found: Mapping[str, Any]) -> PackedFormat:
    kind = found.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"quantization_config: checkpoint_format {kind!r} of gptq is not implemented")
    if found.get("dynamic"):
        raise UnsupportedModel("quantization_config: dynamic, other bits for some layers, is not implemented")
    return PackedFormat(
        "gptq",
        _bits(found, "bits"),
        _group(found),
        zeros_are_less_one=kind == "gptq",
        has_zeros=not truth(found, "sym", False),
        ordered=truth(found, "desc_act", False),
    )


def _awq(found: Mapping[str, Any]) -> PackedFormat:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm" or not truth(found, "zero_point", True):
        raise UnsupportedModel("quantization_config: of awq only version gemm with zero_point is implemented")
    bits = _bits(found, "bits")
    if bits != 4:
        raise UnsupportedModel(f"quantization_config: awq with {bits} bits is not implemented, only 4")
    return PackedFormat("awq", bits, _group(found))


def _compressed(found: Mapping[str, Any]) -> PackedFormat:
    if found.get("transform_config"):
        raise UnsupportedModel("quantization_config: transform_config is not implemented")
    groups = found.get("config_groups")
    formats = set()
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type") != "int":
            raise UnsupportedModel(f"quantization_config: weights of {name} are not integers: {weights}")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel"):
            raise UnsupportedModel(f"quantization_config: strategy {strategy!r} of {name} is not implemented")
        size = _group(weights) if strategy == "group" else None
        formats.add(
            PackedFormat(
                "compressed-tensors",
                _bits(weights, "num_bits"),
                size,
                has_zeros=not truth(weights, "symmetric", True),
                ordered=weights.get("actorder") in ("group", True),
            )
        )
    if len(formats) != 1:
        raise UnsupportedModel("quantization_config: config_groups must be of one kind, with integers packed")
    return formats.pop()


def _bits(found: Mapping[str, Any], key: str) -> int:
    bits = found.get(key)
    if bits not in (4, 8) or isinstance(bits, bool):
        raise UnsupportedModel(f"quantization_config: {key} must be 4 or 8, not {bits!r}")
    return int(bits)


def _group(found: Mapping[str, Any]) -> int | None:
    """-1 stands for all inputs."""
    size = found.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise UnsupportedModel(
            f"quantization_config: group_size must be a positive integer or -1, not {size!r}"
        )
    return None if size == -1 else size
