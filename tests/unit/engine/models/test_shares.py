"""Each rank's part of every tensor: together the parts are the whole tensor, and each rank reads only its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.config import ModelSpec, parse_spec, read_config
from engine.models.errors import UnsupportedModel
from engine.models.loader import load_model
from engine.models.shares import Shares, vocabulary_share
from engine.models.tensor_shapes import tensor_shapes
from engine.models.weights import CheckpointWeights, DummyWeights, WeightSource
from engine.parallel.ranks import OneRank
from engine.settings import ModelSettings

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "odd vocabulary": {"vocab_size": 53},
    "tiny vocabulary": {"vocab_size": 5},
    "tied": {"tie_word_embeddings": True},
    "few kv heads": {"num_key_value_heads": 2},
    "one kv head": {"num_key_value_heads": 1},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]

BY_ROWS = ("q_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
KEYS = ("k_proj", "v_proj")


def write_model(directory: Path, **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps({**BASE, **changes}))
    return parse_spec(read_config(directory))


def random_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(spec).items()}


def check(spec: ModelSpec, whole: dict[str, Tensor], sources: list[WeightSource]) -> None:
    """Checks that the tensors of all ranks' `sources` together are those of `whole`."""
    size, local = len(sources), spec.shard(len(sources))
    holders = max(1, size // spec.num_kv_heads)
    for name, expected in whole.items():
        parts = [source.take(name) for source in sources]
        assert all(part.is_contiguous() for part in parts)
        if name == "lm_head.weight":
            together = torch.cat(parts)
            assert {part.shape for part in parts} == {(-(-spec.vocab_size // size), spec.hidden_size)}
            assert torch.equal(together[: spec.vocab_size], expected)
            assert not together[spec.vocab_size :].any()
        elif any(mark in name for mark in BY_ROWS):
            assert torch.equal(torch.cat(parts), expected)
        elif name.endswith(BY_COLUMNS):
            assert torch.equal(torch.cat(parts, 1), expected)
        elif any(mark in name for mark in KEYS):
            assert torch.equal(torch.cat(parts[::holders]), expected)
            assert all(torch.equal(part, parts[rank // holders * holders]) for rank, part in enumerate(parts))
            assert parts[0].shape[0] == local.num_kv_heads * spec.head_dim
        elif name.endswith(("o_proj.bias", "down_proj.bias")):
            assert torch.equal(parts[0], expected)
            assert not any(part.any() for part in parts[1:])
        else:
            assert all(torch.equal(part, expected) for part in parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_checkpoint_parts_make_the_whole(tmp_path: Path, model: str, size: int, device: str) -> None:
    spec = write_model(tmp_path, **MODELS[model])
    whole = random_tensors(spec)
    save_file(whole, tmp_path / "model.safetensors")
    place = torch.device(device)
    sources = [
        CheckpointWeights(tmp_path, spec, torch.float32, place, Shares(spec, rank, size))
        for rank in range(size)
    ]
    assert all(source.take("model.norm.weight").device.type == device for source in sources)
    check(spec, {name: tensor.to(place) for name, tensor in whole.items()}, list(sources))
    for source in sources:
        source.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["biased", "odd vocabulary", "one kv head"])
def test_dummy_parts_make_the_whole(tmp_path: Path, model: str, device: str) -> None:
    spec, place = write_model(tmp_path, **MODELS[model]), torch.device(device)
    alone = DummyWeights(spec, torch.float32, 3, place)
    whole = {name: alone.take(name) for name in tensor_shapes(spec)}
    assert all(tensor.device.type == device for tensor in whole.values())
    assert 0.01 < whole["lm_head.weight"].std() < 0.04
    check(spec, whole, [DummyWeights(spec, torch.float32, 3, place, Shares(spec, r, 4)) for r in range(4)])


def test_query_heads_stay_with_the_keys_they_share(tmp_path: Path) -> None:
    """8 query heads over 4, 2 or 1 key heads, for 2, 4 and 8 ranks: each rank's query heads find their own key head."""
    for kv_heads in (4, 2, 1):
        spec = write_model(tmp_path, num_key_value_heads=kv_heads)
        group = spec.num_heads // kv_heads
        for size in (2, 4, 8):
            local = spec.shard(size)
            for rank in range(size):
                shares, dim = Shares(spec, rank, size), spec.head_dim
                queries = shares.part("model.layers.0.self_attn.q_proj.weight")
                keys = shares.part("model.layers.0.self_attn.k_proj.weight")
                assert queries is not None
                assert keys is not None
                for head in range(local.num_heads):
                    key_head = keys.start // dim + head // (local.num_heads // local.num_kv_heads)
                    assert (queries.start // dim + head) // group == key_head


def test_tied_head_is_cut_like_a_head_of_its_own() -> None:
    whole = torch.randn(53, 4)
    parts = [vocabulary_share(whole, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts)[:53], whole)
    assert {part.shape for part in parts} == {(14, 4)}
    assert vocabulary_share(whole, 0, 1) is whole


@pytest.mark.parametrize(
    ("size", "changes", "field"),
    [
        (3, {}, "num_attention_heads"),
        (16, {}, "num_attention_heads"),
        (4, {"intermediate_size": 42}, "intermediate_size"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads"),
    ],
)
def test_what_cannot_be_shared_out_is_named(
    tmp_path: Path, size: int, changes: dict[str, Any], field: str
) -> None:
    spec = write_model(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=f"{field} .* {size} ranks"):
        Shares(spec, 0, size)


class TwoRanks(OneRank):
    """Two ranks whose collectives nobody calls."""

    size = 2


def test_bridged_models_are_not_shared_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModel, match="tensor_parallel 2: only native families"):
        load_model(ModelSettings(path=str(tmp_path), device="cpu"), ranks=TwoRanks())


def test_ranks_are_not_deterministic(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"execution\.deterministic: 2 ranks"):
        load_model(ModelSettings(path=str(tmp_path), device="cpu"), ranks=TwoRanks(), deterministic=True)
