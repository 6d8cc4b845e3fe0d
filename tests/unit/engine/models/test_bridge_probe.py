"""What the bridge finds out about a model, and what it refuses and why. Parity is in tests/parity/test_bridge.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from engine.attention.interface import AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.models.bridge import BridgedModel, PagedAttention
from engine.models.bridge_probe import CAUSAL, STRANGE, context_limit, mask_verdict
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.settings import CacheSettings, ModelSettings

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}


def load(config: Any, directory: Path, **settings: Any) -> LoadedModel:
    """Loads a model with random weights, which needs no checkpoint."""
    config.save_pretrained(directory)
    return load_model(
        ModelSettings(str(directory), device="cpu", **{"load_format": "dummy", "num_threads": 1, **settings})
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: transformers.Llama4TextConfig(**SMALL, head_dim=16, attention_chunk_size=32),
            "mask of layer 0 is neither causal nor a sliding window",
        ),
        (
            lambda: transformers.MambaConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2),
            "does not go through transformers' attention interface",
        ),
        (
            lambda: transformers.BloomConfig(vocab_size=160, hidden_size=64, n_layer=2, n_head=4),
            "does not go through transformers' attention interface",
        ),
        (
            lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
            "1 of its 2 layers attend",
        ),
        (
            lambda: transformers.BertConfig(**SMALL),
            "mask of layer 0 is neither causal",
        ),
        (lambda: transformers.DogeConfig(**SMALL), "mask of layer 0 is neither causal"),
        (lambda: transformers.T5Config(vocab_size=160, d_model=64), "no causal language model"),
    ],
    ids=["chunked", "state space", "alibi", "convolution", "both ways", "masks of its own", "encoder"],
)
def test_refusals_name_their_reason(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(make(), tmp_path)


def test_a_model_that_would_come_out_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused whatever the reason. Here the reason is a soft cap that is dropped on the way."""
    config = transformers.Gemma2Config(**SMALL, head_dim=16, attn_logit_softcapping=0.01)
    load(config, tmp_path)
    whole = PagedAttention.__call__

    def careless(self: PagedAttention, *args: Any, **kwargs: Any) -> Any:
        return whole(self, *args, **{**kwargs, "softcap": None})

    monkeypatch.setattr(PagedAttention, "__call__", careless)
    with pytest.raises(UnsupportedModel, match="differs from itself"):
        load(config, tmp_path)


def test_a_model_unknown_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "nothing", "architectures": ["NothingForCausalLM"]}'
    )
    with pytest.raises(UnsupportedModel, match=r"nothing.*and not native: .*NothingForCausalLM"):
        load_model(ModelSettings(str(tmp_path), device="cpu"))


def test_how_many_heads_have_sinks_is_known(tmp_path: Path) -> None:
    with_sinks = transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    assert load(with_sinks, tmp_path).sinks == with_sinks.num_attention_heads
    assert load(transformers.GPTNeoXConfig(**SMALL), tmp_path).sinks == 0


def test_a_bridged_model_is_not_deterministic(tmp_path: Path) -> None:
    transformers.GPTNeoXConfig(**SMALL).save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path), device="cpu", load_format="dummy")
    with pytest.raises(UnsupportedModel, match=r"execution\.deterministic is for native models .*gpt_neox"):
        load_model(settings, deterministic=True)


def test_native_families_stay_native(tmp_path: Path) -> None:
    native = load(transformers.LlamaConfig(**SMALL), tmp_path)
    assert native.native
    partial = transformers.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert isinstance(load(partial, tmp_path).model, BridgedModel), (
        "what no native family has goes over the bridge"
    )


def test_values_narrower_than_keys_are_widened(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=2,
        attention_bias=True,
    )
    loaded = load(config, tmp_path)
    assert not loaded.native, "it has biases, which latent attention has not"
    assert loaded.layout == KVLayout(4, 24, (None, None))


def test_windows_as_long_as_the_context_are_none(tmp_path: Path) -> None:
    for window, found in ((512, None), (511, 511)):
        loaded = load(transformers.Starcoder2Config(**SMALL, sliding_window=window), tmp_path)
        assert loaded.layout.windows == (found, found)


def test_frequencies_that_follow_the_longest_request_are_held_still() -> None:
    long = transformers.Phi3Config(**SMALL, rope_parameters=LONGROPE, original_max_position_embeddings=128)
    assert context_limit(long) == 128, "past it, a batch mate would change everybody's rotations"
    assert context_limit(transformers.Phi3Config(**SMALL)) == 512


@torch.inference_mode()
def run_logits(loaded: LoadedModel) -> torch.Tensor:
    pool = make_kv_pool(loaded.layout, CacheSettings(1, 8), loaded.dtype, loaded.device)
    item = AttentionItem(3, 3, np.arange(3, dtype=np.int32), True)
    step = TorchAttention(pool).begin([item], [torch.arange(3)])
    return loaded.model.logits(loaded.model.forward(torch.tensor([4, 5, 6]), torch.arange(3), step))


def test_dummy_weights_are_seeded(tmp_path: Path) -> None:
    config = transformers.Olmo2Config(**SMALL)
    before = torch.get_rng_state()
    first, again, other = (run_logits(load(config, tmp_path, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), before), "nobody else's random numbers change"


def test_bfloat16(tmp_path: Path) -> None:
    loaded = load(transformers.Olmo2Config(**SMALL), tmp_path, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert run_logits(loaded).dtype == torch.float32


def test_two_models_do_not_meet(tmp_path: Path) -> None:
    """Each model has its own function in transformers' table."""
    one = load(transformers.Olmo2Config(**SMALL), tmp_path, seed=1)
    expected = run_logits(one)
    load(transformers.Phi3Config(**SMALL, pad_token_id=None), tmp_path, seed=2)
    assert torch.equal(run_logits(one), expected)


def test_what_torch_has_written_is_not_read(tmp_path: Path) -> None:
    """A pickle may contain a program."""
    config = transformers.Olmo2Config(**SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(BadCheckpoint, match="safetensors"):
        load(config, tmp_path, load_format="auto")


def test_damaged_checkpoints(tmp_path: Path) -> None:
    config = transformers.Olmo2Config(**SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    without = {key: value for key, value in weights.items() if key != name}
    for damaged in (without, {**weights, name: torch.zeros(1, 2)}):
        save_file(damaged, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BadCheckpoint, match="up_proj"):
            load(config, tmp_path, load_format="auto")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint):
        load(config, tmp_path, load_format="auto")


@pytest.mark.parametrize(
    ("mask", "verdict"),
    [
        (masking_utils.causal_mask_function, CAUSAL),
        (masking_utils.sliding_window_causal_mask_function(24), 24),
        (masking_utils.sliding_window_causal_mask_function(1), 1),
        (masking_utils.sliding_window_causal_mask_function(300), CAUSAL),
        (masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int64)), STRANGE),
        (masking_utils.bidirectional_mask_function, STRANGE),
        (masking_utils.sliding_window_overlay(24), STRANGE),
        (lambda batch, head, query, key: key[query], STRANGE),  # noqa: ARG005
    ],
)
def test_verdicts_on_masks(mask: Callable[..., Any], verdict: int) -> None:
    assert mask_verdict(mask, 256) == verdict
