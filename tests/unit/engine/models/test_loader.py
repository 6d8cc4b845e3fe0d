"""Loading: dummy weights, damaged checkpoints, end-of-text ids, dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.attention.interface import AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.models.config import parse_spec, read_config
from engine.models.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from engine.models.loader import LoadedModel, load_model, native_spec, read_eos_ids
from engine.models.tensor_shapes import tensor_shapes
from engine.models.weights import DummyWeights
from engine.runner.kv_pool import make_kv_pool
from engine.settings import CacheSettings, ModelSettings

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
}


def write_config(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    spec = parse_spec(read_config(directory))
    source = DummyWeights(spec, torch.float32, 3)
    return {name: source.take(name) for name in tensor_shapes(spec)}


def load(directory: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelSettings(path=str(directory), device="cpu", **settings))


def run_logits(loaded: LoadedModel) -> torch.Tensor:
    """The logits after three tokens."""
    pool = make_kv_pool(loaded.layout, CacheSettings(1, 8, window_ratio=1.0), loaded.dtype, loaded.device)
    pages, slots_N = np.arange(3, dtype=np.int32), torch.arange(3, device=loaded.device)
    items = [AttentionItem(3, 3, pages, True, pages)]
    step = TorchAttention(pool).begin(items, [slots_N, slots_N])
    tokens, positions = torch.tensor([4, 5, 6], device=loaded.device), torch.arange(3, device=loaded.device)
    with torch.inference_mode():
        return loaded.model.logits(loaded.model.forward(tokens, positions, step)).cpu()


def test_dummy_weights_are_seeded(tmp_path: Path) -> None:
    write_config(tmp_path)
    first, again, other = (run_logits(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_equals_the_weights_saved(tmp_path: Path, tied: bool) -> None:
    write_config(tmp_path, tie_word_embeddings=tied)
    tensors = weights(tmp_path)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = run_logits(load(tmp_path, load_format="dummy", seed=3))
    assert torch.equal(run_logits(load(tmp_path)), expected)


def test_bfloat16_weights_stay_close(tmp_path: Path) -> None:
    write_config(tmp_path)
    wide = run_logits(load(tmp_path, load_format="dummy", seed=3))
    save_file(weights(tmp_path), tmp_path / "model.safetensors")
    loaded = load(tmp_path, dtype="bfloat16")
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(run_logits(loaded), wide, atol=0.02, rtol=0.05)


def test_damaged_checkpoints_name_the_weight(tmp_path: Path) -> None:
    write_config(tmp_path)
    good = weights(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = {
        f"missing weights: {name}": {key: value for key, value in good.items() if key != name},
        "nothing reads: extra.weight": {**good, "extra.weight": torch.zeros(1)},
        rf"{name} is \(1, 2\)": {**good, name: torch.zeros(1, 2)},
    }
    for message, tensors in damaged.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(BadCheckpoint, match=message):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        load(tmp_path)


def test_each_expert_s_weights_are_named(tmp_path: Path) -> None:
    write_config(tmp_path, **EXPERTS)
    tensors = weights(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(run_logits(load(tmp_path)), run_logits(load(tmp_path, load_format="dummy", seed=3)))
    del tensors[name := "model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"missing weights: {name}"):
        load(tmp_path)


def test_experts_are_native_on_a_cpu_only(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, **EXPERTS))
    assert native_spec(config, torch.device("cpu")).experts is not None
    with pytest.raises(UnsupportedModel, match="experts are native on a CPU only"):
        native_spec(config, torch.device("cuda"))
    assert native_spec(CONFIG, torch.device("cuda")).experts is None


def test_absent_files(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors"):
        load(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="model-00001-of-00002"):
        load(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": 5}, {"weight_map": {}}, {"weight_map": {"a": 7}}, {"weight_map": None}]
)
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        BadCheckpoint, match=r"model\.safetensors\.index\.json: weight_map must name the file"
    ):
        load(tmp_path)


def test_eos_ids(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert read_eos_ids(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_eos_ids(tmp_path) == {5, 6}
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_eos_ids(write_config(tmp_path, eos_token_id=None)) == frozenset()


@pytest.mark.parametrize("value", ["2", 2.0, [1, "2"], True])
def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path, value: object) -> None:
    """A text was taken for as many ids as it has characters."""
    with pytest.raises(UnsupportedModel, match=r"config\.json: eos_token_id must be an integer"):
        read_eos_ids(write_config(tmp_path, eos_token_id=value))
