"""The native families and how they differ, by the architecture name in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from engine.models.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """`bias_keys` are the bias flags of config.json that this family reads, with their `default_bias`. `window` says
    when it has a sliding window: never, when use_sliding_window is set (in some layers, or in all of them), always
    unless sliding_window is null, or in the layers that layer_types names. `experts`: whose way some layers, or all,
    have them instead of an MLP, and with `sigmoid_router` they are chosen by sigmoids. `sinks`: heads have attention
    sinks. `latent`: attention has latents. `required` keys have defaults of their own in this family, so config.json
    must have them."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    bias_keys: frozenset[str] = frozenset()
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    window: Literal["never", "flag", "flag for all", "always", "by layer"] = "never"
    experts: Literal["none", "qwen3_moe", "gpt_oss", "deepseek"] = "none"
    default_bias: bool = False
    sigmoid_router: bool = False
    sinks: bool = False
    latent: bool = False
    required: frozenset[str] = frozenset()


DEEPSEEK_KEYS = frozenset(
    {"max_position_embeddings", "n_shared_experts", "q_lora_rank", "rms_norm_eps", "routed_scaling_factor"}
)

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    experts="deepseek",
    sigmoid_router=True,
    latent=True,
    required=DEEPSEEK_KEYS | {"norm_topk_prob"},
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama", bias_keys=frozenset({"attention_bias", "mlp_bias"})),
        "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, default_kv_heads=32, window="flag"),
        "Qwen3ForCausalLM": Family(
            "qwen3",
            qk_norm=True,
            bias_keys=frozenset({"attention_bias"}),
            default_kv_heads=32,
            default_head_dim=128,
            window="flag",
        ),
        "Qwen3MoeForCausalLM": Family(
            "qwen3_moe",
            qk_norm=True,
            bias_keys=frozenset({"attention_bias"}),
            default_kv_heads=4,
            window="flag for all",
            experts="qwen3_moe",
        ),
        "MistralForCausalLM": Family("mistral", default_kv_heads=8, window="always"),
        "GptOssForCausalLM": Family(
            "gpt_oss",
            bias_keys=frozenset({"attention_bias"}),
            default_bias=True,
            default_kv_heads=8,
            default_head_dim=64,
            window="by layer",
            experts="gpt_oss",
            sinks=True,
            required=frozenset(
                {"sliding_window", "rope_type", "rope_theta", "rms_norm_eps", "max_position_embeddings"}
            ),
        ),
        "DeepseekV2ForCausalLM": Family(
            "deepseek_v2",
            experts="deepseek",
            latent=True,
            required=DEEPSEEK_KEYS | {"topk_method"},
        ),
        "DeepseekV3ForCausalLM": DEEPSEEK_V3,
        "Glm4MoeLiteForCausalLM": replace(DEEPSEEK_V3, name="glm4_moe_lite"),
    }
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json, by `architectures`, else by `model_type`. Raises UnsupportedModel."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"config.json: architectures must be a list of texts, not {names!r}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names:
        for family in FAMILIES.values():
            if family.name == config.get("model_type"):
                return family
    known = ", ".join(FAMILIES)
    raise UnsupportedModel(f"architectures {names or config.get('model_type')!r}: native ones are {known}")
