"""Models with latent attention: what their configurations say, what is refused, and what their checkpoints hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from meant_weights import check_each_weight, check_model
from safetensors.torch import save_file
from test_fp8_weights import DEEPSEEK, write_fp8
from test_loader import load, run_logits, weights, write_config

from engine.models.config import parse_spec, read_config
from engine.models.errors import BadCheckpoint, UnsupportedModel
from engine.models.experts_config import Routing
from engine.models.layers import interleave_rotary
from engine.models.loader import load_model, native_spec
from engine.models.tensor_shapes import CORRECTION
from engine.settings import AdapterSettings, ModelSettings

YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2_LITE = DIMS | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}
V3 = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": DEEPSEEK | {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.0,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("config", "layers_of_experts", "stretched", "routing"),
    [
        (V2_LITE, 26, 0.1 * 0.707 * math.log(40) + 1, Routing(6, norm_topk=False)),
        (V3, 58, 0.1 * math.log(40) + 1, Routing(8, True, True, groups=8, top_groups=4, factor=2.5)),
        (KIMI_K2, 60, 0.1 * math.log(32) + 1, Routing(8, True, True, factor=2.827)),
        (GLM_FLASH, 46, 1.0, Routing(4, True, True, factor=1.8)),
    ],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2", "GLM-4.7-Flash"],
)
def test_sizes_of_published_models(
    config: dict[str, Any], layers_of_experts: int, stretched: float, routing: Routing
) -> None:
    spec = parse_spec(config)
    assert spec.latent is not None
    assert spec.experts is not None
    assert (spec.num_kv_heads, spec.head_dim, spec.rotary_dim) == (1, 576, 64)
    query_dim = config["qk_nope_head_dim"] + 64
    assert spec.scale == pytest.approx(query_dim**-0.5 * stretched**2)
    assert spec.rope.attention_factor == 1.0
    assert len(spec.experts.layers) == layers_of_experts
    assert max(spec.experts.layers) == spec.num_layers - 1
    assert spec.experts.shared_size == config["n_shared_experts"] * config["moe_intermediate_size"]
    assert spec.experts.routing == routing
    layout = spec.kv_layout
    assert (layout.num_vectors, layout.value_dim) == (1, 512)
    assert layout.page_bytes(layout.num_layers, 1, torch.bfloat16) == spec.num_layers * 576 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": ...}, "deepseek_v3 lacks q_lora_rank"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, not 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, not None"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, not 7"),
        ({"attention_bias": True}, "attention_bias is not implemented"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be the 128"),
        ({"rope_interleave": "no"}, "rope_interleave must be true or false"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not implemented in deepseek_v3"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not implemented in deepseek_v3"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"n_group": 7}, "n_group 7 and topk_group 4 do not fit 8 of 256"),
        ({"n_group": 256}, "n_group 256"),
        ({"topk_group": 9}, "n_group 8 and topk_group 9"),
        ({"num_experts_per_tok": 129}, "do not fit 129 of 256"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok 257 of 256"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer from 0"),
        ({"n_shared_experts": 0.5}, "n_shared_experts must be an integer from 0"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a positive number"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "deepseek_v2"),
        ({**V2_LITE, "norm_topk_prob": True}, "norm_topk_prob is not implemented in deepseek_v2"),
        ({"first_k_dense_replace": ...}, "lacks first_k_dense_replace"),
        ({**GLM_FLASH, "mlp_layer_types": ["dense"]}, "mlp_layer_types must be dense or sparse for 47"),
        ({**GLM_FLASH, "mlp_layer_types": [["dense"]] * 47}, "mlp_layer_types must be"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    """`...` leaves a key out."""
    said = {key: value for key, value in (V3 | changes).items() if value is not ...}
    with pytest.raises(UnsupportedModel, match=message):
        parse_spec(said)


def test_layers_of_experts_may_be_named_one_by_one() -> None:
    kinds = ["sparse", "dense"] * 2
    spec = parse_spec(GLM_FLASH | {"num_hidden_layers": 4, "mlp_layer_types": kinds})
    assert [spec.experts_of(layer) is not None for layer in range(4)] == [True, False, True, False]
    assert parse_spec(V3 | {"first_k_dense_replace": 61}).experts is None


def test_only_one_process_on_a_cpu_runs_them(tmp_path: Path) -> None:
    dense = SMALL | {"first_k_dense_replace": 2}
    config = read_config(write_config(tmp_path, **dense))
    with pytest.raises(UnsupportedModel, match="latent attention is native on a CPU only"):
        native_spec(config, torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match="tensor_parallel 2: latents of attention"):
        native_spec(config, torch.device("cpu")).shard(2)
    adapters = (AdapterSettings("pirate", str(tmp_path)),)
    with pytest.raises(UnsupportedModel, match=r"model\.adapters are not implemented for latent attention"):
        load_model(ModelSettings(str(tmp_path), "dummy", device="cpu", adapters=adapters))


def test_layers_that_predict_more_tokens_are_not_read(tmp_path: Path) -> None:
    """DeepSeek-V3 has such layers behind the last one."""
    write_config(tmp_path, **SMALL)
    tensors = weights(tmp_path)
    expected = run_logits(load(tmp_path, load_format="dummy", seed=3))
    for behind in ("embed_tokens", "eh_proj", "mlp.gate"):
        tensors[f"model.layers.2.{behind}.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"nothing reads: model\.layers\.2\.eh_proj"):
        load(tmp_path)
    write_config(tmp_path, **SMALL, num_nextn_predict_layers=1)
    assert torch.equal(run_logits(load(tmp_path)), expected)
    tensors["model.layers.20.mlp.gate.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"nothing reads: model\.layers\.20\."):
        load(tmp_path)


def test_what_corrects_the_choice_of_experts_is_not_rounded(tmp_path: Path) -> None:
    """Every token's choice hangs on differences that bfloat16 does not have."""
    write_config(tmp_path, **SMALL)
    tensors = weights(tmp_path)
    choices = []
    for correction in ([3.0, 3.0, 3.001, 3.001], [3.0, 3.0, 2.999, 2.999], [3.0, 3.0, 3.0, 3.0]):
        tensors[f"model.layers.1.{CORRECTION}"] = torch.tensor(correction)
        tensors["model.layers.1.mlp.gate.weight"].zero_()
        save_file(tensors, tmp_path / "model.safetensors")
        choices.append(run_logits(load(tmp_path, dtype="bfloat16")))
    high, low, equal = choices
    assert not torch.allclose(high, low)
    assert torch.equal(low, equal), "of equal ones the first"


@pytest.mark.parametrize("query_rank", [24, None], ids=["query latents", "plain queries"])
def test_fp8_checkpoints(tmp_path: Path, query_rank: int | None) -> None:
    changes = SMALL | {"q_lora_rank": query_rank}
    meant = write_fp8(tmp_path, DEEPSEEK, "block", "weight_scale_inv", **changes)
    check_each_weight(tmp_path, meant, ranks=1)
    attention, dense, experts = (2 if query_rank is None else 3), 2, 2 * (4 + 1)
    check_model(tmp_path, meant, changes, kept=2 * attention + dense + experts)


def test_plain_features_stay_where_they_are() -> None:
    rows = torch.arange(14.0)
    assert interleave_rotary(rows, 7, plain_dim=3).tolist() == [0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 12, 11, 13]
