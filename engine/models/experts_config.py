"""Reads from a config.json which layers have experts, and how their router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.models.clamped_swiglu import ClampedSwiglu
from engine.models.config_values import positive_integer, positive_number, truth, whole_number
from engine.models.errors import UnsupportedModel
from engine.models.registry import Family


@dataclass(frozen=True, slots=True)
class Routing:
    """A router chooses `top_k` experts for each token, those with the highest scores; their weights are the softmax of
    the scores. With `norm_topk` the weights of the chosen sum to one. They are multiplied by `factor`.

    With `groups`, which are experts one after another, it chooses among those of the `top_groups` best groups. A group
    is as good as its best expert (DeepSeek-V2, 2024). With `sigmoid` weights are the scores' sigmoids, a correction is
    added to these for the choice alone, and a group is as good as its best two together (DeepSeek-V3, 2024).
    """

    top_k: int
    norm_topk: bool
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """`layers` have `num_experts` gated MLPs of `intermediate_size` in place of one, and one more of `shared_size`, if
    that is not 0, for every token. With `clamped`, their activation, they are GPT-OSS's: they and the router have
    biases, and those of a layer are one tensor in the checkpoint."""

    layers: frozenset[int]
    num_experts: int
    intermediate_size: int
    routing: Routing
    shared_size: int = 0
    clamped: ClampedSwiglu | None = None


def parse_experts(config: Mapping[str, Any], family: Family, num_layers: int) -> ExpertsSpec | None:
    """None if no layer has experts. Raises UnsupportedModel that names the key."""
    if family.experts == "none":
        return None
    if family.experts == "deepseek":
        return _parse_deepseek(config, family, num_layers)
    # transformers 5 writes num_experts as num_local_experts
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    if type(config.get(key)) is int and config[key] == 0:
        return None
    num_experts = positive_integer(config, key)
    if family.experts == "gpt_oss":
        alpha, limit = (
            positive_number(config, key, default)
            for key, default in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))
        )
        return ExpertsSpec(
            frozenset(range(num_layers)),
            num_experts,
            positive_integer(config, "intermediate_size"),
            Routing(_top_k(config, num_experts), norm_topk=True),
            clamped=ClampedSwiglu(alpha, limit),
        )
    step = positive_integer(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UnsupportedModel(f"config.json: mlp_only_layers must be a list of integers, not {dense!r}")
    routing = Routing(_top_k(config, num_experts), truth(config, "norm_topk_prob", False))
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not layers:
        return None
    return ExpertsSpec(layers, num_experts, positive_integer(config, "moe_intermediate_size"), routing)


def _top_k(config: Mapping[str, Any], num_experts: int) -> int:
    top_k = positive_integer(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise UnsupportedModel(f"config.json: num_experts_per_tok {top_k} of {num_experts} experts")
    return top_k


def _parse_deepseek(config: Mapping[str, Any], family: Family, num_layers: int) -> ExpertsSpec | None:
    layers = _sparse_layers(config, num_layers)
    if not layers:
        return None
    num_experts, inner = (
        positive_integer(config, key) for key in ("n_routed_experts", "moe_intermediate_size")
    )
    sigmoid = family.sigmoid_router
    norm_topk = truth(config, "norm_topk_prob", False)
    methods = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
    for key, known in (
        ("scoring_func", ("sigmoid",) if sigmoid else ("softmax",)),
        ("topk_method", methods),
        ("moe_layer_freq", (1,)),
    ):
        if config.get(key, known[0]) not in known:
            raise UnsupportedModel(f"config.json: {key} {config[key]!r} is not implemented in {family.name}")
    if norm_topk and not sigmoid:
        raise UnsupportedModel("config.json: norm_topk_prob is not implemented in deepseek_v2")
    routing = Routing(
        _top_k(config, num_experts),
        norm_topk,
        sigmoid=sigmoid,
        factor=positive_number(config, "routed_scaling_factor", 1.0),
    )
    if sigmoid or config.get("topk_method") == "group_limited_greedy":
        routing = _with_groups(config, routing, num_experts)
    return ExpertsSpec(
        layers, num_experts, inner, routing, shared_size=inner * whole_number(config, "n_shared_experts")
    )


def _sparse_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """All layers but the first few; GLM-4.7 Flash may say it of each layer."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        if "first_k_dense_replace" not in config:
            raise UnsupportedModel("config.json lacks first_k_dense_replace")
        return frozenset(range(whole_number(config, "first_k_dense_replace"), num_layers))
    known = ("dense", "sparse")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise UnsupportedModel(
            f"config.json: mlp_layer_types must be dense or sparse for {num_layers} layers"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _with_groups(config: Mapping[str, Any], routing: Routing, num_experts: int) -> Routing:
    groups, top_groups = positive_integer(config, "n_group"), positive_integer(config, "topk_group")
    size, rest = divmod(num_experts, groups)
    if (
        rest
        or size < (2 if routing.sigmoid else 1)
        or top_groups > groups
        or routing.top_k > top_groups * size
    ):
        raise UnsupportedModel(
            f"config.json: n_group {groups} and topk_group {top_groups} do not fit {routing.top_k} of "
            f"{num_experts} experts"
        )
    return replace(routing, groups=groups, top_groups=top_groups)
