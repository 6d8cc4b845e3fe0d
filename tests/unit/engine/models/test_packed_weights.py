"""Checkpoints of packed integers: the numbers that they stand for, and what is refused.

The packers here are as slow and plain as the formats' definitions: one integer after another into its word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from meant_weights import check_each_weight, check_model
from safetensors.torch import load_file, save_file
from test_loader import CONFIG, EXPERTS, load, weights, write_config
from torch import Tensor

from engine.models.config import parse_spec, read_config
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.packed_weights import in_order, unpacked
from engine.models.weights import CheckpointWeights

GROUP = 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in its word AWQ puts the first of eight outputs, the second, and so on."""


def compressed(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | changes, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@dataclass
class Matrix:
    """Integers [O, I], and for each group [O, G] a zero and a scale; `groups` has the group of each input."""

    values: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    @property
    def meant(self) -> Tensor:
        return (self.values - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def words(values: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """Packs the last dimension. Integer n of a word lies at place places[n]."""
    per_word = 32 // bits
    rows = []
    for row in values.tolist():
        packed = [0] * -(-len(row) // per_word)
        for index, value in enumerate(row):
            place = index % per_word if places is None else places[index % per_word]
            packed[index // per_word] |= value << (place * bits)
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def made(
    shape: tuple[int, ...], bits: int, group: int | None, symmetric: bool, seed: int, shuffled: bool
) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    (outputs, inputs), group = shape, group or shape[1]
    count = -(-inputs // group)
    zeros = torch.full((outputs, count), 2 ** (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 2**bits, (outputs, count), generator=generator)
    groups = torch.arange(inputs) // group
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=generator)]
    values = torch.randint(0, 2**bits, shape, generator=generator)
    scales = (torch.rand(outputs, count, generator=generator) * 0.02 + 0.001).half()
    return Matrix(values, zeros, scales, groups)


def as_gptq(matrix: Matrix, bits: int, less: int) -> dict[str, Tensor]:
    return {
        "qweight": words(matrix.values, bits).t().contiguous(),
        "qzeros": words(matrix.zeros.t() - less, bits),
        "scales": matrix.scales.t().contiguous(),
        "g_idx": matrix.groups.int(),
    }


def as_awq(matrix: Matrix, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(matrix.values.t(), bits, AWQ_PLACES),
        "qzeros": words(matrix.zeros.t(), bits, AWQ_PLACES),
        "scales": matrix.scales.t().contiguous(),
    }


def as_compressed(matrix: Matrix, bits: int, symmetric: bool, shuffled: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(matrix.values, bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.values.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(matrix.zeros.t(), bits).t().contiguous()
    if shuffled:
        tensors["weight_g_idx"] = matrix.groups.int()
    return tensors


@dataclass
class Case:
    """`pack` gives the tensors of a matrix by their field. It may change the matrix."""

    quantization: dict[str, Any]
    pack: Callable[[Matrix], dict[str, Tensor]]
    bits: int = 4
    group: int | None = GROUP
    symmetric: bool = False
    shuffled: bool = False

    def write(self, directory: Path, **changes: Any) -> dict[str, Tensor]:
        """Writes a checkpoint whose projections are packed. Returns the weights that it stands for."""
        write_config(directory, quantization_config=self.quantization, **changes)
        stored, meant = {}, {}
        for seed, (name, weight) in enumerate(weights(directory).items()):
            if not name.endswith("_proj.weight"):
                stored[name] = meant[name] = weight
                continue
            matrix = made(tuple(weight.shape), self.bits, self.group, self.symmetric, seed, self.shuffled)
            packed = self.pack(matrix)
            stored |= {name.removesuffix("weight") + field: tensor for field, tensor in packed.items()}
            meant[name] = matrix.meant
        save_file(stored, directory / "model.safetensors")
        return meant


CASES = {
    "gptq": Case(GPTQ, lambda matrix: as_gptq(matrix, 4, 1)),
    "gptq, symmetric": Case(GPTQ | {"sym": True}, lambda matrix: as_gptq(matrix, 4, 1), symmetric=True),
    "gptq, symmetric, with zeros of version 2": Case(
        GPTQ | {"sym": True}, lambda matrix: as_gptq(matrix, 4, 0), symmetric=True
    ),
    "gptq of version 2": Case(GPTQ | {"checkpoint_format": "gptq_v2"}, lambda matrix: as_gptq(matrix, 4, 0)),
    "gptq of 8 bits, in its own order": Case(
        GPTQ | {"bits": 8, "desc_act": True}, lambda matrix: as_gptq(matrix, 8, 1), 8, shuffled=True
    ),
    "gptq, one group": Case(GPTQ | {"group_size": -1}, lambda matrix: as_gptq(matrix, 4, 1), group=None),
    "awq": Case(AWQ, lambda matrix: as_awq(matrix, 4)),
    "compressed": Case(compressed(), lambda matrix: as_compressed(matrix, 4, False, False)),
    "compressed, symmetric": Case(
        compressed(symmetric=True), lambda matrix: as_compressed(matrix, 4, True, False), symmetric=True
    ),
    "compressed of 8 bits, channels": Case(
        compressed(num_bits=8, strategy="channel", group_size=None),
        lambda matrix: as_compressed(matrix, 8, False, False),
        8,
        None,
    ),
    "compressed, in its own order": Case(
        compressed(actorder="group"), lambda matrix: as_compressed(matrix, 4, False, True), shuffled=True
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_each_weight_is_its_integer_less_the_zero_times_the_scale(
    tmp_path: Path, case: str, ranks: int
) -> None:
    check_each_weight(tmp_path, CASES[case].write(tmp_path), ranks)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("case", ["gptq", "awq", "compressed"])
def test_the_model_is_the_one_that_is_meant(tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    check_model(tmp_path, CASES[case].write(tmp_path, **changes), changes)


def test_the_order_of_integers_in_a_word() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpacked(word, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpacked(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76]]
    assert unpacked(torch.tensor([-1], dtype=torch.int32), 4).tolist() == [15] * 8
    assert in_order(unpacked(word, 4).t()).flatten().tolist() == AWQ_PLACES


def test_gptq_s_zero_of_nothing_borrows_from_the_next(tmp_path: Path) -> None:
    """GPTQModel writes its first format so: it takes one from all of a word's integers at once."""

    def pack(matrix: Matrix) -> dict[str, Tensor]:
        matrix.zeros[::3] = 0
        return as_gptq(matrix, 4, 0) | {"qzeros": words(matrix.zeros.t(), 4) - 0x11111111}

    meant = Case(GPTQ, pack).write(tmp_path)
    source = CheckpointWeights(tmp_path, parse_spec(read_config(tmp_path)), torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(source.take(name), meant[name])
    matrix = source.take_quantized(name)
    assert matrix is not None
    assert torch.equal(matrix.multiplied(torch.float32), meant[name])
    source.close()


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_is_what_is_meant(tmp_path: Path, case: str) -> None:
    meant = CASES[case].write(tmp_path)
    source = CheckpointWeights(tmp_path, parse_spec(read_config(tmp_path)), torch.float32)
    for name, expected in meant.items():
        matrix = source.take_quantized(name)
        kept = name.endswith("_proj.weight") and not CASES[case].shuffled
        assert (matrix is not None) == kept, name
        if matrix is not None:
            assert torch.equal(matrix.multiplied(torch.float32), expected), name
    source.close()


def test_a_bias_of_zeros_that_the_model_does_not_have(tmp_path: Path) -> None:
    CASES["gptq"].write(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    stored = load_file(file)
    save_file(stored | {name: torch.zeros(48)}, file)
    load(tmp_path)
    save_file(stored | {name: torch.full((48,), 0.1)}, file)
    with pytest.raises(BadCheckpoint, match=f"nothing reads: {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "replaced", "message"),
    [
        (
            "qweight",
            torch.zeros(1, 48, dtype=torch.int32),
            r"qweight is \(1, 48\), .* asks for \(4, 48\)",
        ),
        ("qweight", torch.zeros(4, 48), "qweight has the type F32, not I32"),
        ("scales", torch.zeros(2, 48), r"scales is \(2, 48\)"),
        ("g_idx", torch.full((32,), 4, dtype=torch.int32), "g_idx names a group beyond the 4"),
        ("qzeros", None, r"missing weights: model\.layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, field: str, replaced: Tensor | None, message: str) -> None:
    CASES["gptq"].write(tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.up_proj.{field}"
    del stored[name]
    save_file(stored if replaced is None else stored | {name: replaced}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (GPTQ | {"bits": 3}, "bits must be 4 or 8, not 3"),
        (GPTQ | {"group_size": 0}, "group_size must be"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"lm_head": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"sym": "false"}, "sym must be true or false"),
        (GPTQ | {"desc_act": "false"}, "desc_act must be true or false"),
        (AWQ | {"zero_point": "false"}, "zero_point must be true or false"),
        (compressed(symmetric="false"), "symmetric must be true or false"),
        (AWQ | {"bits": 8}, "awq with 8 bits"),
        (AWQ | {"version": "gemv"}, "version gemm"),
        (AWQ | {"zero_point": False}, "with zero_point"),
        (compressed(num_bits=3), "num_bits must be 4 or 8"),
        (compressed(type="float"), "are not integers"),
        (compressed(strategy="tensor"), "strategy 'tensor'"),
        (compressed() | {"config_groups": {}}, "config_groups"),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(quantization: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        parse_spec({**CONFIG, "quantization_config": quantization})


def test_an_order_that_is_asked_for_and_is_not_there(tmp_path: Path) -> None:
    """In the order of inputs such a matrix would be another, without a word."""
    case = CASES["gptq of 8 bits, in its own order"]
    case.write(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: each for name, each in stored.items() if "g_idx" not in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(BadCheckpoint, match="missing weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    "quantization", [GPTQ | {"bits": 3}, AWQ | {"version": "gemv"}, compressed(num_bits=3)], ids=str
)
def test_the_reason_reaches_who_starts_a_replica(tmp_path: Path, quantization: dict[str, Any]) -> None:
    """transformers' bridge fails for a reason of its own: a package that is not installed."""
    write_config(tmp_path, model_type="llama", quantization_config=quantization)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises((UnsupportedModel, BadCheckpoint), match="and not native: quantization_config"):
        load(tmp_path)


def test_a_matrix_that_does_not_fill_its_words(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config=GPTQ, intermediate_size=44)
    stored = {name: tensor for name, tensor in weights(tmp_path).items() if "layers.0.mlp.up" not in name}
    for field in ("qweight", "qzeros"):
        stored[f"model.layers.0.mlp.up_proj.{field}"] = torch.zeros(4, 44, dtype=torch.int32)
    stored["model.layers.0.mlp.up_proj.scales"] = torch.zeros(4, 44)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="44 x 32 weights cannot be packed as gptq"):
        load(tmp_path)
