"""Adapters are read as PEFT applies them, and what would be computed in another way is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from engine.models.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapters
from engine.models.config import ModelSpec, parse_spec, read_config
from engine.models.errors import BadCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from engine.models.loader import load_model
from engine.parallel.ranks import OneRank
from engine.settings import AdapterSettings, ModelSettings
from tests.unit.engine.models.adapter_files import write_adapter, write_files
from tests.unit.engine.models.peft_adapters import CONFIGS, adapted
from tests.unit.engine.tiny_llama import TINY_LLAMA

LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LORA_B = LORA_A.replace("lora_A", "lora_B")
SIZES = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return parse_spec(read_config(tmp_path))


def test_updates_are_those_of_peft(tmp_path: Path) -> None:
    """Whole and partial, with ranks and scales of their own."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    model.save_pretrained(tmp_path)
    spec = parse_spec(read_config(tmp_path))
    whole, settings = adapted(model, tmp_path, list(CONFIGS))
    adapters = read_adapters(settings, spec, torch.float32)
    assert [adapter.name for adapter in adapters] == list(CONFIGS)
    for adapter in adapters:
        updated = {
            name.removeprefix("base_model.model."): module.get_delta_weight(adapter.name)
            for name, module in whole.named_modules()
            if adapter.name in getattr(module, "lora_A", {})
        }
        assert adapter.updates.keys() == updated.keys()
        for name, update in adapter.updates.items():
            torch.testing.assert_close(update.b_OR @ update.a_RI, updated[name])
    assert len({adapter.fingerprint for adapter in adapters}) == len(CONFIGS)


def test_updates_are_held_as_the_model_is(tmp_path: Path, spec: ModelSpec) -> None:
    (adapter,) = read_adapters([write_adapter(tmp_path / "a", spec, 2)], spec, torch.bfloat16)
    assert {(each.a_RI.dtype, each.b_OR.dtype) for each in adapter.updates.values()} == {
        (torch.bfloat16, torch.bfloat16)
    }


def test_the_order_of_patterns_tells_adapters_apart(tmp_path: Path, spec: ModelSpec) -> None:
    """The first pattern that fits decides. A fingerprint of the files in canonical form was the same for both."""
    patterns = [("q_proj", 100), ("self_attn.q_proj", 1)]
    settings = [
        write_adapter(tmp_path / name, spec, 2, config={"alpha_pattern": dict(order)})
        for name, order in (("a", patterns), ("b", patterns[::-1]))
    ]
    a, b = read_adapters(settings, spec, torch.float32)
    name = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(a.updates[name].b_OR, 100 * b.updates[name].b_OR)
    assert a.fingerprint != b.fingerprint


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path, spec: ModelSpec) -> None:
    settings = [
        write_adapter(tmp_path / name, spec, 2, seed=seed)
        for name, seed in zip("abc", (1, 1, 2), strict=True)
    ]
    a, b, c = (adapter.fingerprint for adapter in read_adapters(settings, spec, torch.float32))
    assert a == b != c


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], type[ModelError], str]] = {
    "the embedding": (
        lambda t: t | {"base_model.model.model.embed_tokens.lora_A": torch.ones(2, 50)},
        UnsupportedModel,
        "embed_tokens",
    ),
    "the head": (
        lambda t: t | {"base_model.model.lm_head.weight": torch.ones(50, 32)},
        UnsupportedModel,
        "lm_head",
    ),
    "an expert": (
        lambda t: t | {LORA_A.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.ones(2, 32)},
        UnsupportedModel,
        r"experts\.0",
    ),
    "a layer too many": (
        lambda t: t | {LORA_A.replace("layers.0", "layers.2"): torch.ones(2, 32)},
        UnsupportedModel,
        r"layers\.2",
    ),
    "DoRA": (
        lambda t: t | {LORA_A.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(32)},
        UnsupportedModel,
        "magnitude",
    ),
    "other inputs": (lambda t: t | {LORA_A: torch.ones(2, 31)}, BadCheckpoint, r"\(2, 31\).*\(32, 32\)"),
    "other outputs": (lambda t: t | {LORA_B: torch.ones(31, 2)}, BadCheckpoint, r"\(31, 2\).*\(32, 32\)"),
    "a vector": (lambda t: t | {LORA_A: torch.ones(32)}, BadCheckpoint, r"\(32,\)"),
    "half of it": (lambda t: without(t, LORA_B), BadCheckpoint, "only one of lora_A and lora_B"),
    "two ranks": (lambda t: t | {LORA_A: torch.ones(3, 32)}, BadCheckpoint, "ranks 3 and 2"),
    "no rank": (
        lambda t: t | {LORA_A: torch.ones(0, 32), LORA_B: torch.ones(32, 0)},
        BadCheckpoint,
        "ranks 0 and 0",
    ),
    "another rank than it says": (
        lambda t: t | {LORA_A: torch.ones(3, 32), LORA_B: torch.ones(32, 3)},
        BadCheckpoint,
        "ranks 3 and 3, and 2 in",
    ),
    "infinite": (lambda t: t | {LORA_B: torch.full((32, 2), torch.inf)}, BadCheckpoint, "not finite"),
    "nothing": (lambda _: {}, BadCheckpoint, "updates nothing"),
}


@pytest.mark.parametrize("fault", TENSORS)
def test_other_tensors_are_refused_by_name(tmp_path: Path, spec: ModelSpec, fault: str) -> None:
    spoil, error, told = TENSORS[fault]
    settings = write_adapter(tmp_path / "mine", spec, 2)
    write_files(tmp_path / "mine", spoil(load_file(tmp_path / "mine" / WEIGHTS_FILE)), {"r": 2})
    with pytest.raises(error, match=rf"model\.adapters\.mine: .*{told}"):
        read_adapters([settings], spec, torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"(": 1}},
        {"rank_pattern": {"q_proj": None}},
        {"use_rslora": "false"},
        {"alora_invocation_tokens": [1]},
        {"something_new": 3},
    ],
    ids=lambda config: next(iter(config)),
)
def test_another_kind_of_adapter_is_refused_by_name(
    tmp_path: Path, spec: ModelSpec, config: dict[str, Any]
) -> None:
    settings = write_adapter(tmp_path / "mine", spec, 2, config=config)
    with pytest.raises(UnsupportedModel, match=rf"model\.adapters\.mine: .*{next(iter(config))}"):
        read_adapters([settings], spec, torch.float32)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_folder_without_its_files_is_refused(tmp_path: Path, spec: ModelSpec, name: str) -> None:
    settings = write_adapter(tmp_path / "mine", spec, 2)
    (tmp_path / "mine" / name).unlink()
    with pytest.raises(ModelNotFound, match=f"no {name}"):
        read_adapters([settings], spec, torch.float32)


def test_a_broken_file_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    settings = write_adapter(tmp_path / "mine", spec, 2)
    (tmp_path / "mine" / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(BadCheckpoint, match="not a safetensors file"):
        read_adapters([settings], spec, torch.float32)


class TwoRanks(OneRank):
    size = 2


def test_models_that_have_no_adapters_refuse_them(tmp_path: Path, spec: ModelSpec) -> None:
    adapters = (AdapterSettings("mine", write_adapter(tmp_path / "mine", spec, 2).path),)
    settings = ModelSettings(str(tmp_path), "dummy", device="cpu", adapters=adapters)
    with pytest.raises(UnsupportedModel, match=r"model\.adapters need the compiled CPU kernels: .*asked for"):
        load_model(settings, linear="torch")
    with pytest.raises(UnsupportedModel, match=r"model\.adapters need .*tensor_parallel 2"):
        load_model(settings, ranks=TwoRanks())
    gpt = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(gpt))
    with pytest.raises(UnsupportedModel, match=r"model\.adapters are for native models"):
        load_model(settings)
