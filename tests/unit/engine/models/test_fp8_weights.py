"""Checkpoints in fp8 are loaded as the numbers that they stand for, in each format; others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from meant_weights import check_each_weight, check_model
from safetensors.torch import save_file
from test_loader import CONFIG, EXPERTS, load, weights, write_config
from torch import Tensor

from engine.models.config import parse_spec
from engine.models.errors import BadCheckpoint, UnsupportedModel

LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = (16, 24)
"""Divides neither all outputs nor all inputs of the model."""

DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def scales_of(weight_OI: Tensor, kind: str) -> Tensor:
    """The least scales with which nothing overflows."""
    if kind == "tensor":
        return weight_OI.abs().amax().reshape(1) / LARGEST
    if kind == "channel":
        return weight_OI.abs().amax(1, keepdim=True) / LARGEST
    rows = [part.split(BLOCK[1], 1) for part in weight_OI.split(BLOCK[0])]
    return torch.tensor([[float(part.abs().max()) / LARGEST for part in row] for row in rows])


def spread(scale: Tensor, weight_OI: Tensor, kind: str) -> Tensor:
    """The scale of each number."""
    if kind == "block":
        scale = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        scale = scale[: len(weight_OI), : weight_OI.shape[1]]
    return scale.expand_as(weight_OI)


FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "DeepSeek's blocks": (DEEPSEEK, "block", "weight_scale_inv"),
    "one scale a matrix": (PER_TENSOR, "tensor", "weight_scale"),
    "compressed, tensor": (compressed("tensor"), "tensor", "weight_scale"),
    "compressed, channel": (compressed("channel"), "channel", "weight_scale"),
    "compressed, block": (compressed("block", block_structure=list(BLOCK)), "block", "weight_scale"),
}


def write_fp8(
    directory: Path, quantization: dict[str, Any], kind: str, scale_name: str, **changes: Any
) -> dict[str, Tensor]:
    """Writes a checkpoint whose projections are in fp8. Returns the weights that it stands for."""
    write_config(directory, quantization_config=quantization, **changes)
    stored, meant = {}, {}
    for name, weight in weights(directory).items():
        stored[name] = meant[name] = weight
        if "_proj" not in name or not name.endswith(".weight"):
            continue
        scale = scales_of(weight, kind)
        each_OI = spread(scale, weight, kind)
        stored[name] = (weight / each_OI).to(torch.float8_e4m3fn)
        stored[name.removesuffix("weight") + scale_name] = scale
        if quantization is PER_TENSOR:
            stored[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        meant[name] = stored[name].to(torch.float32) * each_OI
    save_file(stored, directory / "model.safetensors")
    return meant


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", FORMATS)
def test_each_number_is_multiplied_by_its_scale(tmp_path: Path, case: str, ranks: int) -> None:
    check_each_weight(tmp_path, write_fp8(tmp_path, *FORMATS[case]), ranks)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("case", FORMATS)
def test_the_model_is_the_one_that_is_meant(tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    check_model(tmp_path, write_fp8(tmp_path, *FORMATS[case], **changes), changes)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({"load_in_8bit": True}, "quant_method None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format"),
        (compressed("channel", num_bits=4), "not 8-bit floats"),
        (compressed("token"), "strategy 'token'"),
        ("fp8", "must be an object"),
    ],
    ids=str,
)
def test_other_formats_are_refused_by_name(quantization: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        parse_spec({**CONFIG, "quantization_config": quantization})


def test_a_scale_that_does_not_fit(tmp_path: Path) -> None:
    write_fp8(tmp_path, *FORMATS["DeepSeek's blocks"])
    write_config(tmp_path, quantization_config={**DEEPSEEK, "weight_block_size": [128, 128]})
    with pytest.raises(BadCheckpoint, match=r"weight_scale_inv is \(\d, \d\), which does not fit"):
        load(tmp_path)


def test_fp8_without_a_format_and_without_a_scale(tmp_path: Path) -> None:
    write_fp8(tmp_path, *FORMATS["one scale a matrix"])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="no quantization_config"):
        load(tmp_path)
    stored = {name: weight.to(torch.float8_e4m3fn) for name, weight in weights(tmp_path).items()}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=DEEPSEEK)
    with pytest.raises(BadCheckpoint, match="has no weight_scale_inv or weight_scale"):
        load(tmp_path)


def test_a_scale_of_a_weight_that_is_not_in_fp8_is_left_over(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config=DEEPSEEK)
    stored = weights(tmp_path)
    stored["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="weights nothing reads"):
        load(tmp_path)
