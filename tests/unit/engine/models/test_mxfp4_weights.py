"""Experts in MXFP4: the numbers that transformers makes of them, the model that they mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_loader import load, run_logits
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.cpu.library import Kernels, find_kernels
from engine.models.config import parse_spec, read_config
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.linear import PlainLinear
from engine.models.loader import load_model
from engine.models.mxfp4_weights import parse_mxfp4
from engine.models.tensor_shapes import tensor_shapes
from engine.models.weights import CheckpointWeights, DummyWeights
from engine.settings import ModelSettings

LAYERS, EXPERTS = 2, 3
CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SHAPES = {"gate_up_proj": (64, 64), "down_proj": (64, 32)}
"""Outputs and inputs of an expert."""


def saved(directory: Path, seed: int = 3) -> dict[str, Tensor]:
    """Saves a checkpoint, and returns the plain one that it means."""
    generator = torch.Generator().manual_seed(seed)
    spec = parse_spec(CONFIG)
    source = DummyWeights(spec, torch.float32, seed)
    meant = {name: source.take(name).contiguous() for name in tensor_shapes(spec)}
    for name, tensor in meant.items():
        if name.endswith(("bias", "sinks")):
            tensor.normal_(0, 0.5, generator=generator)
    stored = dict(meant)
    for layer in range(LAYERS):
        for product, (outputs, inputs) in SHAPES.items():
            name = f"model.layers.{layer}.mlp.experts.{product}"
            blocks, scales = (
                torch.randint(low, high, (EXPERTS, outputs, inputs // 32, *rest), generator=generator).byte()
                for low, high, rest in ((0, 256, (16,)), (118, 122, ()))
            )
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": MXFP4}))
    save_file(stored, directory / "model.safetensors")
    return meant


def test_each_weight_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    meant = saved(tmp_path)
    source = CheckpointWeights(tmp_path, parse_spec(read_config(tmp_path)), torch.float32)
    for name, expected in meant.items():
        assert torch.equal(source.take(name), expected), name
        kept = source.take_quantized(name)
        assert (kept is not None) == name.endswith(tuple(SHAPES)), name
        if kept is not None:
            rows = expected.transpose(1, 2).flatten(0, 1)
            assert torch.equal(kept.multiplied(torch.float32), rows), name
    source.close()


def test_the_model_is_the_one_that_is_meant(tmp_path: Path) -> None:
    """With products that keep the numbers as they are stored, and with those that do not."""
    meant = saved(tmp_path)
    (plain := tmp_path / "plain").mkdir()
    (plain / "config.json").write_text(json.dumps(CONFIG))
    save_file(meant, plain / "model.safetensors")
    expected, found = load(plain, dtype="float32"), load(tmp_path, dtype="float32")
    assert found.native
    if isinstance(find_kernels(), Kernels):
        assert found.about["quantized"] == f"{2 * EXPERTS * LAYERS} matrices of fp4"
    assert torch.equal(run_logits(found), run_logits(expected))
    assert found.fingerprint != expected.fingerprint
    settings = ModelSettings(path=str(tmp_path), device="cpu", dtype="float32")
    torch.testing.assert_close(
        run_logits(load_model(settings, PlainLinear)), run_logits(expected), atol=1e-4, rtol=1e-4
    )


def test_transformers_reads_the_same_model(tmp_path: Path) -> None:
    """It multiplies the weights out."""
    saved(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).float().eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([[4, 5, 6]])).logits[0]
    torch.testing.assert_close(run_logits(load(tmp_path, dtype="float32")), expected, atol=1e-4, rtol=1e-4)


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": MXFP4}))
    first, other = (run_logits(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 2))
    assert first.isfinite().all()
    assert not torch.allclose(first, other)
    settings = ModelSettings(path=str(tmp_path), device="cpu", load_format="dummy", seed=1)
    torch.testing.assert_close(run_logits(load_model(settings, PlainLinear)), first, atol=1e-3, rtol=1e-3)


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("name", "replaced", "message"),
    [
        (SCALES, None, r"missing weights: model.layers.1.mlp.experts.down_proj$"),
        (SCALES, torch.zeros(3, 64, 2, dtype=torch.uint8), r"down_proj_scales is \(3, 64, 2\)"),
        (BLOCKS, torch.zeros(3, 64, 1, 8, dtype=torch.uint8), r"down_proj_blocks is \(3, 64, 1, 8\)"),
        (BLOCKS, torch.zeros(3, 64, 1, 16), "down_proj_blocks has the type F32, not U8"),
        ("model.layers.0.self_attn.sinks", torch.zeros(2), r"sinks is \(2,\)"),
        ("model.layers.0.mlp.router.bias", None, r"missing weights: model.layers.0.mlp.router.bias"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, name: str, replaced: Tensor | None, message: str) -> None:
    saved(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[name]
    save_file(stored | ({} if replaced is None else {name: replaced}), tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        load(tmp_path)


@pytest.mark.parametrize("quantization", [{"quant_method": "gptq"}, {}, "mxfp4 "])
def test_other_formats_are_refused_by_name(quantization: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantization_config: .*is not implemented, mxfp4 is"):
        parse_mxfp4({"quantization_config": quantization})


def test_inputs_that_do_not_fill_their_blocks() -> None:
    config = CONFIG | {"intermediate_size": 48, "quantization_config": MXFP4}
    with pytest.raises(UnsupportedModel, match="48 inputs are no multiple of mxfp4's blocks of 32"):
        DummyWeights(parse_spec(config), torch.float32, 1).take("model.layers.0.mlp.experts.down_proj")
