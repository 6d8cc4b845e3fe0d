"""Models that transformers knows and Kedge does not, with Kedge's pages: greedy tokens equal transformers', in float32.

None of these models has code in Kedge. The table says only how to make each one and what the bridge must find out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from engine.models.bridge import BridgedModel
from tests.parity.streams import CONTEXT, VOCAB, Peer, prompts, serve

WINDOW = 24
NO_WINDOW = (None, None, None)
ALL_WINDOWS = (WINDOW, WINDOW, WINDOW)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FACTORS = [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "original_max_position_embeddings": 128,
}
"""No native family has it."""


@dataclass(frozen=True)
class Case:
    """A model. `windows` is what the bridge must find: the window of each layer."""

    config: Callable[[], Any]
    windows: tuple[int | None, ...] = NO_WINDOW


CASES = {
    "cohere2": Case(
        lambda: transformers.Cohere2Config(
            **SMALL, sliding_window=WINDOW, layer_types=ALTERNATING, logit_scale=0.25
        ),
        (WINDOW, None, WINDOW),
    ),
    "deepseek_v3-biased": Case(
        lambda: transformers.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4, **EXPERTS},
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            attention_bias=True,
        )
    ),
    "gemma2": Case(
        lambda: transformers.Gemma2Config(
            **SMALL,
            head_dim=16,
            sliding_window=WINDOW,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=20.0,
            query_pre_attn_scalar=24,
        ),
        (WINDOW, None, WINDOW),
    ),
    "gemma3": Case(
        lambda: transformers.Gemma3TextConfig(
            **SMALL, head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING
        ),
        (WINDOW, None, WINDOW),
    ),
    "glm4": Case(lambda: transformers.Glm4Config(**SMALL, head_dim=16)),
    "gpt2": Case(
        lambda: transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=CONTEXT,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    ),
    "gpt_neox": Case(lambda: transformers.GPTNeoXConfig(**SMALL)),
    "gpt_oss-longrope": Case(
        lambda: transformers.GptOssConfig(
            **SMALL,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=LONGROPE,
        ),
        (WINDOW, None, WINDOW),
    ),
    "granite": Case(
        lambda: transformers.GraniteConfig(
            **SMALL,
            logits_scaling=3.0,
            residual_multiplier=0.5,
            embedding_multiplier=2.0,
            attention_multiplier=0.2,
        )
    ),
    "llama-longrope": Case(lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LONGROPE)),
    "mixtral": Case(
        lambda: transformers.MixtralConfig(
            **SMALL, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
        ),
        ALL_WINDOWS,
    ),
    "olmo2": Case(lambda: transformers.Olmo2Config(**SMALL)),
    "phi3": Case(lambda: transformers.Phi3Config(**SMALL, sliding_window=WINDOW), ALL_WINDOWS),
    "qwen3_moe-longrope": Case(
        lambda: transformers.Qwen3MoeConfig(
            **SMALL, **EXPERTS, head_dim=16, num_experts=4, rope_parameters=LONGROPE
        )
    ),
    "smollm3": Case(lambda: transformers.SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1])),
    "stablelm": Case(lambda: transformers.StableLmConfig(**SMALL)),
    "starcoder2": Case(lambda: transformers.Starcoder2Config(**SMALL, sliding_window=WINDOW), ALL_WINDOWS),
}


def make_model(config: Any) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scales = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if scales else 0.0, 0.2)
    return model


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Peer]:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_model(CASES[request.param].config())
    model.save_pretrained(directory)
    return CASES[request.param], Peer(model, directory)


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_tokens_equal(case: tuple[Case, Peer], page_size: int, scattered: bool) -> None:
    expected, peer = case
    loaded = peer.load()
    assert isinstance(loaded.model, BridgedModel)
    assert loaded.layout.windows == expected.windows
    streams = serve(loaded, prompts(), page_size, scattered, chunk=13)
    for stream in streams:
        assert stream.produced == peer.first_choices(stream)
    assert len({token for stream in streams for token in stream.produced}) > 16, (
        "tokens that hardly vary prove little"
    )
