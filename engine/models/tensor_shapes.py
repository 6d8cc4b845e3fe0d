"""Every tensor of a model, by its name in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.config import ModelSpec
from engine.models.experts_config import ExpertsSpec
from engine.models.latent_config import LatentSpec

CORRECTION = "mlp.gate.e_score_correction_bias"
"""Decides between experts whose scores are close, so it is never rounded."""


Projections = Mapping[str, tuple[tuple[int, int], bool]]
"""By name, the shape [outputs, inputs] and whether there is a bias."""


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its checkpoint name."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        for name, shape in _layer_shapes(spec, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.latent is None:
        projections = dict(_head_projections(spec))
    else:
        projections = dict(_latent_projections(spec, spec.latent))
        shapes |= _latent_norms(spec.latent)
    mlps, inner = ["mlp"], spec.intermediate_size
    experts = spec.experts_of(layer)
    if experts is not None and experts.clamped is not None:
        mlps = []
        shapes |= _stacked_shapes(experts, hidden)
    elif experts is not None:
        shapes["mlp.gate.weight"] = (experts.num_experts, hidden)
        mlps = [f"mlp.experts.{index}" for index in range(experts.num_experts)]
        inner = experts.intermediate_size
        if experts.routing.sigmoid:
            shapes[CORRECTION] = (experts.num_experts,)
        if experts.shared_size:
            projections |= _mlp_projections("mlp.shared_experts", hidden, experts.shared_size, spec.mlp_bias)
    for mlp in mlps:
        projections |= _mlp_projections(mlp, hidden, inner, spec.mlp_bias)
    for name, (shape, has_bias) in projections.items():
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def _mlp_projections(name: str, hidden: int, inner: int, has_bias: bool) -> Projections:
    return {
        f"{name}.gate_proj": ((inner, hidden), has_bias),
        f"{name}.up_proj": ((inner, hidden), has_bias),
        f"{name}.down_proj": ((hidden, inner), has_bias),
    }


def _head_projections(spec: ModelSpec) -> Projections:
    hidden, queries, keys = (
        spec.hidden_size,
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
    )
    return {
        "self_attn.q_proj": ((queries, hidden), spec.qkv_bias),
        "self_attn.k_proj": ((keys, hidden), spec.qkv_bias),
        "self_attn.v_proj": ((keys, hidden), spec.qkv_bias),
        "self_attn.o_proj": ((hidden, queries), spec.out_bias),
    }


def _latent_projections(spec: ModelSpec, latent: LatentSpec) -> Projections:
    hidden, heads = spec.hidden_size, spec.num_heads
    projections = {
        "self_attn.kv_a_proj_with_mqa": ((latent.key_dim, hidden), False),
        "self_attn.kv_b_proj": ((heads * (latent.plain_dim + latent.value_dim), latent.rank), False),
        "self_attn.o_proj": ((hidden, heads * latent.value_dim), False),
    }
    if latent.query_rank is None:
        return projections | {"self_attn.q_proj": ((heads * latent.query_dim, hidden), False)}
    return projections | {
        "self_attn.q_a_proj": ((latent.query_rank, hidden), False),
        "self_attn.q_b_proj": ((heads * latent.query_dim, latent.query_rank), False),
    }


def _latent_norms(latent: LatentSpec) -> dict[str, tuple[int, ...]]:
    norms: dict[str, tuple[int, ...]] = {"self_attn.kv_a_layernorm.weight": (latent.rank,)}
    if latent.query_rank is not None:
        norms["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
    return norms


def _stacked_shapes(experts: ExpertsSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    count, inner = experts.num_experts, experts.intermediate_size
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }
