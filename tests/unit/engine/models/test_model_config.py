"""config.json as this year's and last year's transformers write it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.models.clamped_swiglu import ClampedSwiglu
from engine.models.config import parse_spec, read_config
from engine.models.errors import ModelNotFound, UnsupportedModel
from engine.models.experts_config import ExpertsSpec, Routing
from engine.models.rope import RopeSpec
from engine.runner.kv_pool import KVLayout

QWEN_WINDOW = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return {**base, **changes}


def test_llama_of_both_writings() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = config(
        rope_theta=5e5,
        rope_scaling={**scaling, "rope_type": "llama3", "original_max_position_embeddings": 64},
        torch_dtype="bfloat16",
    )
    new = config(
        rope_parameters={
            **scaling,
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
        },
        dtype="bfloat16",
    )
    spec = parse_spec(old)
    assert spec == parse_spec(new)
    assert spec.rope == RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert (spec.head_dim, spec.num_kv_heads, spec.checkpoint_dtype) == (16, 2, "bfloat16")


def test_what_families_build_in() -> None:
    qwen2 = parse_spec(config(architectures=["Qwen2ForCausalLM"], sliding_window=128))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_spec(config(architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mistral = parse_spec(config(architectures=["MistralForCausalLM"], sliding_window=None, head_dim=32))
    assert (mistral.head_dim, mistral.windows) == (32, (None, None))
    llama = parse_spec(config(attention_bias=True, mlp_bias=True, num_key_value_heads=None))
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias, llama.num_kv_heads) == (True, True, True, 4)
    assert parse_spec(config(architectures=None, model_type="llama")) == parse_spec(config())


def moe(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    return config(**base, **changes)


def test_experts() -> None:
    spec = parse_spec(moe(norm_topk_prob=True))
    assert spec.experts == ExpertsSpec(frozenset(range(spec.num_layers)), 8, 24, Routing(2, norm_topk=True))
    renamed = moe() | {"num_local_experts": 8}  # as transformers 5 writes it
    del renamed["num_experts"]
    assert parse_spec(renamed) == parse_spec(moe())
    mixed = parse_spec(moe(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [mixed.experts_of(layer) is not None for layer in range(4)] == [False, True, False, False]
    for dense in ({"num_experts": 0}, {"mlp_only_layers": [0, 1, 2, 3]}):
        assert parse_spec(moe(num_hidden_layers=4) | dense).experts is None
    with pytest.raises(UnsupportedModel, match="tensor_parallel 2: experts"):
        spec.shard(2)


def test_every_layer_of_experts_has_the_window() -> None:
    assert parse_spec(moe(use_sliding_window=True, sliding_window=8, max_window_layers=1)).windows == (8, 8)
    assert parse_spec(moe(sliding_window=8)).windows == (None, None)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8},
}


def test_yarn_stretches_the_context() -> None:
    """As Qwen's model cards say how to turn it on: max_position_embeddings stays that of the training."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse_spec(config(rope_scaling=yarn)).max_context_len == 1024
    assert parse_spec(config(rope_scaling=yarn, max_position_embeddings=2048)).max_context_len == 2048
    assert parse_spec(config(rope_scaling=yarn | {"rope_type": "linear"})).max_context_len == 256


def test_gpt_oss() -> None:
    spec = parse_spec(config(**GPT_OSS, quantization_config={"quant_method": "mxfp4"}))
    routing = Routing(2, norm_topk=True)
    assert spec.experts == ExpertsSpec(frozenset({0, 1}), 8, 128, routing, clamped=ClampedSwiglu(1.702, 7.0))
    assert (spec.sinks, spec.qkv_bias, spec.out_bias, spec.head_dim) == (True, True, True, 64)
    assert spec.windows == (8, None)
    assert spec.is_quantized
    assert (spec.rope.type, spec.rope.theta) == ("yarn", 150_000)
    changed = parse_spec(
        config(**GPT_OSS, swiglu_limit=3, attention_bias=False, layer_types=["full_attention"] * 2)
    )
    assert changed.experts is not None
    assert changed.experts.clamped == ClampedSwiglu(1.702, 3.0)
    assert (changed.qkv_bias, changed.windows, changed.is_quantized) == (False, (None, None), False)
    with pytest.raises(UnsupportedModel, match="tensor_parallel 2: experts"):
        spec.shard(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": None}, "gpt_oss lacks rope_type"),
        ({"rope_theta": ...}, "gpt_oss lacks rope_theta"),
        ({"sliding_window": ..., "rms_norm_eps": ...}, "gpt_oss lacks rms_norm_eps, sliding_window"),
        ({"max_position_embeddings": ...}, "gpt_oss lacks max_position_embeddings"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a positive number, not 0"),
        ({"swiglu_alpha": "1"}, "swiglu_alpha must be"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: 'gptq'"),
    ],
)
def test_what_gpt_oss_must_say(changes: dict[str, Any], message: str) -> None:
    """`...` leaves a key out."""
    said = {key: value for key, value in (config(**GPT_OSS) | changes).items() if value is not ...}
    with pytest.raises(UnsupportedModel, match=message):
        parse_spec(said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ({"num_experts": None}, "num_experts must be"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step must be"),
        ({"num_experts": False}, "num_experts must be"),
        ({"mlp_only_layers": 5}, "mlp_only_layers must be"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers must be"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob must be"),
        ({"use_sliding_window": True, "sliding_window": "x"}, "sliding_window must be"),
        ({"use_sliding_window": True, "sliding_window": True}, "sliding_window must be"),
    ],
)
def test_refused_experts_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_spec(moe() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({**QWEN_WINDOW, "layer_types": ["full_attention"]}, "layer_types of 1 layers"),
        ({**QWEN_WINDOW, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "divide evenly"),
        ({"quantization_config": {"bits": 4}}, "quantization"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
    ],
)
def test_refusals_name_their_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_spec(config(**changes))


@pytest.mark.parametrize("value", ["x", "7", float("nan"), float("inf"), 1.5, -1, 0, True, [1]])
@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
def test_what_is_no_size_is_refused_by_its_key(key: str, value: object) -> None:
    """Texts and NaN ended in an error of Python's that named no key, and numbers of no use were taken."""
    with pytest.raises(UnsupportedModel, match=f"config.json: {key} must be a positive integer, not"):
        parse_spec(config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 5}, "architectures must be a list"),
        ({"architectures": [5]}, "architectures must be a list"),
        ({**QWEN_WINDOW, "max_window_layers": "1"}, "max_window_layers must be an integer"),
        ({**QWEN_WINDOW, "max_window_layers": -1}, "max_window_layers must be an integer"),
        ({**QWEN_WINDOW, "layer_types": 5}, "layer_types must be a list"),
        ({**QWEN_WINDOW, "layer_types": [[], []]}, "layer_types must be a list"),
        (
            {"num_attention_heads": 128, "num_key_value_heads": 128},
            "num_attention_heads 128, .* must be even",
        ),
    ],
)
def test_values_of_another_kind_are_refused_by_their_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_spec(config(**changes))


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], None])
@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("tie_word_embeddings", {}),
        ("attention_bias", {}),
        ("mlp_bias", {}),
        ("use_sliding_window", QWEN_WINDOW),
    ],
)
def test_what_is_no_flag_is_refused_by_its_key(key: str, changes: dict[str, Any], value: object) -> None:
    """The text "false" was taken as true."""
    with pytest.raises(UnsupportedModel, match=f"config.json: {key} must be true or false, not"):
        parse_spec(config(**changes | {key: value}))


def test_yarn_s_flag_is_refused_by_its_key() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "truncate": "false"}
    with pytest.raises(UnsupportedModel, match="truncate must be true or false, not 'false'"):
        parse_spec(config(rope_scaling=scaling))


def test_null_stands_for_what_is_left_out() -> None:
    for key, value in (("head_dim", 16), ("num_key_value_heads", 4), ("max_position_embeddings", 2048)):
        assert parse_spec(config(**{key: None})) == parse_spec(config(**{key: value}))
    windows = config(**QWEN_WINDOW, num_hidden_layers=29, max_window_layers=None)
    assert parse_spec(windows).windows == (None,) * 28 + (8,)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, (None, None)),
        ({**QWEN_WINDOW, "use_sliding_window": False}, (None, None)),
        (QWEN_WINDOW, (None, None)),
        ({**QWEN_WINDOW, "max_window_layers": 1}, (None, 8)),
        ({**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (8, None)),
    ],
)
def test_windows_by_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """Windows are read as transformers reads them. A window as long as the context is none."""
    spec = parse_spec(config(**changes))
    assert spec.windows == windows
    assert spec.kv_layout == KVLayout(spec.num_kv_heads, spec.head_dim, windows)


def test_broken_json(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match=r"not (a )?JSON"):
            parse_spec(read_config(tmp_path))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        parse_spec(read_config(tmp_path))
