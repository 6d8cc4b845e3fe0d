"""Reads the tensors of one layer and makes its parts of them.

Legend: E hidden size, O output features, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.attention.interface import LayerTraits
from engine.models.config import ModelSpec
from engine.models.experts_config import ExpertsSpec
from engine.models.head_attention import HeadAttention
from engine.models.latent_attention import LatentAttention
from engine.models.latent_config import NORM_EPS, LatentSpec
from engine.models.layers import interleave_rotary
from engine.models.linear import ActivatedLinear, GatedLinears, Linear, LinearFactory
from engine.models.mlp import Experts, GatedMlp
from engine.models.ops import DecoderOps
from engine.models.quantized_matrix import (
    QuantizedGatedLinears,
    QuantizedLinears,
    QuantizedMatrix,
    QuantizedSource,
    stack_quantized,
)
from engine.models.stacked_experts import StackedExperts
from engine.models.tensor_shapes import CORRECTION
from engine.models.weights import WeightSource

RowOrders = Mapping[str, Callable[[Tensor], Tensor]]
"""What reorders the rows of a matrix, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One layer's attention, norms and products."""

    attention_norm_E: Tensor
    mlp_norm_E: Tensor
    attention: HeadAttention | LatentAttention
    out: Linear
    mlp: GatedMlp | Experts


class LayerWeights:
    """Reads one layer's tensors and fuses those that are applied to the same input."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        source: WeightSource,
        make_linear: LinearFactory,
        device: torch.device,
        activations: torch.dtype,
    ) -> None:
        self._spec = spec
        self._experts = spec.experts_of(index)
        self._index = index
        self._prefix = f"model.layers.{index}."
        self._source = source
        self._make_linear = make_linear
        self._device = device
        self._activations = activations

    def sinks(self) -> Tensor:
        """A score for each query head, in float32."""
        return (
            self._source.take(f"{self._prefix}self_attn.sinks").to(self._device, torch.float32).contiguous()
        )

    def vector(self, name: str) -> Tensor:
        """A norm's weights, in the dtype of activations."""
        return self._source.take(self._prefix + name).to(self._device, self._activations)

    def parts(self, ops: DecoderOps) -> LayerParts:
        spec = self._spec
        return LayerParts(
            attention_norm_E=self.vector("input_layernorm.weight"),
            mlp_norm_E=self.vector("post_attention_layernorm.weight"),
            attention=self.heads(ops) if spec.latent is None else self.latents(spec.latent, ops),
            out=self.linear("self_attn.o_proj", spec.out_bias),
            mlp=self.mlp("mlp.", ops) if self._experts is None else self.experts(self._experts, ops),
        )

    def heads(self, ops: DecoderOps) -> HeadAttention:
        spec = self._spec
        sinks_H = self.sinks() if spec.sinks else None
        head_norm_AD = self.qk_norm() if spec.qk_norm else None
        return HeadAttention(
            LayerTraits(spec.scale, spec.windows[self._index], sinks_H=sinks_H),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self.qkv(),
            head_norm_AD,
            ops.rotation(head_norm_AD, spec.rms_norm_eps),
        )

    def latents(self, latent: LatentSpec, ops: DecoderOps) -> LatentAttention:
        latent_norm_L, query_norm, query_up = self.vector("self_attn.kv_a_layernorm.weight"), None, None
        query, key = "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"
        order = self._rotary_order(latent)
        if latent.query_rank is not None:
            query = "self_attn.q_a_proj"
            query_norm = self.vector("self_attn.q_a_layernorm.weight")
            query_up = self._fused(["self_attn.q_b_proj"], False, order)
        key_ups, value_ups, plain_ups = self._ups(latent)
        return LatentAttention(
            traits=LayerTraits(latent.scale, self._spec.windows[self._index]),
            latent=latent,
            num_heads=self._spec.num_heads,
            down=self._fused([query, key], False, order),
            query_up=query_up,
            query_norm=query_norm,
            latent_norm_L=latent_norm_L,
            key_ups=key_ups,
            value_ups=value_ups,
            plain_ups=plain_ups,
            normalise_query=None if query_norm is None else ops.norm(query_norm, NORM_EPS),
            normalise_latent=ops.norm(latent_norm_L, NORM_EPS),
            rotate=ops.rotation(None, NORM_EPS),
        )

    def _rotary_order(self, latent: LatentSpec) -> RowOrders:
        if latent.interleaved:
            return {}
        queries = partial(interleave_rotary, head_dim=latent.query_dim, plain_dim=latent.plain_dim)
        return {
            "self_attn.q_proj": queries,
            "self_attn.q_b_proj": queries,
            "self_attn.kv_a_proj_with_mqa": partial(
                interleave_rotary, head_dim=latent.key_dim, plain_dim=latent.rank
            ),
        }

    def _ups(self, latent: LatentSpec) -> tuple[list[Linear], list[Linear], list[Linear]]:
        """By head: the product of a latent's plain features of the key, turned around; that of its value; and the first
        as it is."""
        whole = self._source.take(f"{self._prefix}self_attn.kv_b_proj.weight").to(self._device)
        by_head = whole.view(self._spec.num_heads, -1, latent.rank)
        keys, values = by_head.tensor_split((latent.plain_dim,), 1)
        return (
            [self._make_linear(key.t().contiguous(), None) for key in keys],
            [self._make_linear(value, None) for value in values],
            [self._make_linear(key, None) for key in keys],
        )

    def mlp(self, prefix: str, ops: DecoderOps) -> GatedMlp:
        return GatedMlp(self.gated(prefix, ops), self.linear(f"{prefix}down_proj", self._spec.mlp_bias))

    def experts(self, experts: ExpertsSpec, ops: DecoderOps) -> Experts:
        if experts.clamped is not None:
            prefix = f"{self._prefix}mlp.experts."
            stacked = StackedExperts(self._source, prefix, self._make_linear, self._device)
            mlps = stacked.mlps(experts.num_experts, experts.clamped)
            return Experts(self.linear("mlp.router", True), mlps, experts.routing)
        mlps = [self.mlp(f"mlp.experts.{index}.", ops) for index in range(experts.num_experts)]
        correction_X, shared = None, None
        if experts.routing.sigmoid:
            correction_X = self._source.take(f"{self._prefix}{CORRECTION}").to(self._device, torch.float32)
        if experts.shared_size:
            shared = self.mlp("mlp.shared_experts.", ops)
        return Experts(self.linear("mlp.gate", False), mlps, experts.routing, correction_X, shared)

    def linear(self, name: str, has_bias: bool) -> Linear:
        return self._fused([name], has_bias, {})

    def qkv(self) -> Linear:
        """Rows: queries, keys, values; rotary pairs interleaved in the first two."""
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        order = partial(interleave_rotary, head_dim=self._spec.head_dim)
        return self._fused(names, self._spec.qkv_bias, dict.fromkeys(names[:2], order))

    def gated(self, prefix: str, ops: DecoderOps) -> Linear:
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        has_bias = self._spec.mlp_bias
        if not isinstance(self._make_linear, GatedLinears):
            return ActivatedLinear(self._fused(names, has_bias, {}), ops.silu_mul)
        bias_O = self._stack(names, "bias", {}) if has_bias else None
        if isinstance(self._make_linear, QuantizedGatedLinears):
            return self._make_linear.gated(self._weights(self._make_linear, names, {}), bias_O)
        return self._make_linear.gated(self._stack(names, "weight", {}), bias_O)

    def qk_norm(self) -> Tensor:
        """Per-head norm weights [H + K, D] of queries and keys."""
        spec = self._spec
        query_D = interleave_rotary(self.vector("self_attn.q_norm.weight"), spec.head_dim)
        key_D = interleave_rotary(self.vector("self_attn.k_norm.weight"), spec.head_dim)
        return torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])

    def _fused(self, names: list[str], has_bias: bool, orders: RowOrders) -> Linear:
        bias_O = self._stack(names, "bias", orders) if has_bias else None
        if isinstance(self._make_linear, QuantizedLinears):
            return self._make_linear(self._weights(self._make_linear, names, orders), bias_O)
        return self._make_linear(self._stack(names, "weight", orders), bias_O)

    def _weights(
        self, linears: QuantizedLinears, names: list[str], orders: RowOrders
    ) -> Tensor | QuantizedMatrix:
        """As they are stored if the products keep them so."""
        matrix = self._stack_quantized(names, orders)
        if matrix is not None and linears.keeps(matrix):
            return matrix.to(self._device)
        return self._stack(names, "weight", orders)

    def _stack_quantized(self, names: list[str], orders: RowOrders) -> QuantizedMatrix | None:
        """None unless all of these are quantized, in one way and in equal blocks of inputs."""
        if not isinstance(self._source, QuantizedSource):
            return None
        parts = []
        for name in names:
            part = self._source.take_quantized(f"{self._prefix}{name}.weight")
            if part is None:
                return None
            if name in orders:
                part = part.rearranged(orders[name])
            parts.append(part)
        return stack_quantized(parts)

    def _stack(self, names: list[str], kind: str, orders: RowOrders) -> Tensor:
        parts = [self._source.take(f"{self._prefix}{name}.{kind}") for name in names]
        for position, name in enumerate(names):
            if name in orders:
                parts[position] = orders[name](parts[position])
        return torch.cat(parts).to(self._device) if len(parts) > 1 else parts[0].to(self._device)
