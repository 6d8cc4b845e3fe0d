"""The native model families against transformers in float32: prefill logits are close, greedy tokens are equal.

The tests drive the runner directly, with hand-made page tables: chunked prefill, mixed batches, batched decode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.batch import BatchItem, ScheduledBatch
from tests.parity.place import DEVICE
from tests.parity.streams import CONTEXT, VOCAB, Peer, plain_runner, poisoned_pool, prompts, serve

EMBEDDED = Path(__file__).parents[2] / "assets" / "models" / "kedge-chat"

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.8,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-bfloat16": lambda: transformers.LlamaConfig(**SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-rope3": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama-yarn": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-linear": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LINEAR_ROPE),
    "llama-heads": lambda: transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, head_dim=24),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3-biased": lambda: transformers.Qwen3Config(**SMALL, head_dim=32, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**{**SMALL, "num_key_value_heads": 1}, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, sliding_window=24),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3-window": lambda: transformers.Qwen3Config(
        **SMALL,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
ON_A_CPU: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, mlp_only_layers=[0]),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=20,
        rope_parameters=YARN,
    ),
    "gpt_oss-cap": lambda: transformers.GptOssConfig(
        **SMALL,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=3,
        layer_types=["full_attention"] * 3,
        attention_bias=False,
        rope_parameters=YARN,
        swiglu_limit=0.4,
        swiglu_alpha=1.1,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, first_k_dense_replace=1, n_shared_experts=2
    ),
    "deepseek_v2-groups": lambda: transformers.DeepseekV2Config(
        **LATENT,
        q_lora_rank=28,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=28,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek_v3-halves": lambda: transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**LATENT, q_lora_rank=28, rope_interleave=False),
    "qwen3_moe-window": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, decoder_sparse_step=2, use_sliding_window=True, sliding_window=20
    ),
}
"""Families that a GPU runs over the bridge."""

if DEVICE.type == "cpu":
    CONFIGS |= ON_A_CPU


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    torch.manual_seed(7)
    config = CONFIGS[request.param]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from zero and from one, so that a missing bias or norm shows.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            if request.param == "llama-bfloat16":
                parameter.copy_(parameter.bfloat16())
    directory = tmp_path_factory.mktemp(request.param)
    sharded = {"max_shard_size": "100KB"} if request.param in ("llama", "qwen2") else {}
    model.save_pretrained(directory, **sharded)
    assert (directory / "model.safetensors.index.json").exists() == bool(sharded)
    return Peer(model, directory)


@pytest.fixture(scope="module")
def embedded() -> Peer:
    if not (EMBEDDED / "model.safetensors").is_file():
        pytest.skip("no embedded model here")
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    return Peer(model, EMBEDDED)


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_greedy_tokens_equal(peer: Peer, page_size: int, scattered: bool) -> None:
    loaded = peer.load()
    assert loaded.native
    for stream in serve(loaded, prompts(), page_size, scattered, chunk=13):
        assert stream.produced == peer.first_choices(stream)


def test_embedded_model_equals(embedded: Peer) -> None:
    """The model is saved in bfloat16. Both sides compute in float32."""
    loaded = embedded.load()
    random = np.random.default_rng(5)
    texts = [random.integers(3, loaded.vocab_size, length).tolist() for length in (7, 60)]
    for stream in serve(loaded, texts, 16, False, chunk=32):
        assert stream.produced == embedded.first_choices(stream)


def test_prefill_logits_close(peer: Peer) -> None:
    loaded = peer.load()
    tokens = prompts()[3]
    pool = poisoned_pool(loaded, 16, 8)
    runner = plain_runner(loaded, pool)
    item = BatchItem("a", tokens, 0, np.arange(8, dtype=np.int32), True, None, input_logprobs_from=0)
    item.top_input_logprobs = VOCAB
    item.window_pages = item.pages if pool.window else None
    scored = runner.execute(ScheduledBatch([item])).items[0].input_logprobs
    assert [entry.token_id for entry in scored] == tokens
    assert scored[0].logprob is None
    expected = torch.log_softmax(peer.logits(tokens), -1)
    for position, entry in enumerate(scored[1:]):
        got = torch.empty(VOCAB)
        got[[token for token, _ in entry.top]] = torch.tensor([value for _, value in entry.top])
        torch.testing.assert_close(got, expected[position], atol=2e-4, rtol=2e-4)
        assert entry.logprob == pytest.approx(float(got[entry.token_id]), abs=1e-6)
