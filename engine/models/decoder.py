"""The one decoder that all native families use.

Legend: N tokens, E hidden size, H query heads, K key/value heads, D head size, F inner size of the MLP, V vocabulary, v
= V / ranks rounded up, R rows of which logits are wanted, C rotary frequencies, A query and key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.interface import AttentionStep, LayerTraits, OpenStep
from engine.models.config import ExpertsSpec, ModelSpec
from engine.models.layers import RotaryTable, interleave_rotary
from engine.models.linear import ActivatedLinear, GatedLinears, Linear, LinearFactory
from engine.models.mlp import Experts, GatedMlp
from engine.models.ops import DecoderOps, WritingRotation
from engine.models.quantized_matrix import (
    QuantizedGatedLinears,
    QuantizedLinears,
    QuantizedMatrix,
    QuantizedSource,
    stack_quantized,
)
from engine.models.shares import vocabulary_share
from engine.models.stacked_experts import StackedExperts
from engine.models.weights import WeightSource
from engine.parallel.ranks import RankGroup


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One layer's attention, norms and products. `head_norm_AD` is the norm of query and key heads."""

    traits: LayerTraits
    attention_norm_E: Tensor
    mlp_norm_E: Tensor
    head_norm_AD: Tensor | None
    qkv: Linear
    out: Linear
    mlp: GatedMlp | Experts


class DecoderLayer:
    """Attention and MLP with their residuals. Query, key and value weights are one matrix, gate and up another.

    With several ranks, each has its share of the heads and of the MLP; what they add to the residual stream is summed.
    """

    def __init__(
        self, spec: ModelSpec, index: int, parts: LayerParts, ops: DecoderOps, ranks: RankGroup
    ) -> None:
        self._index = index
        self._ranks = ranks
        self._num_heads = spec.num_heads
        self._num_kv_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._traits = parts.traits
        self._attention_norm = ops.norm(parts.attention_norm_E, spec.rms_norm_eps)
        self._mlp_norm = ops.norm(parts.mlp_norm_E, spec.rms_norm_eps)
        self._rotate_ = ops.rotation(parts.head_norm_AD, spec.rms_norm_eps)
        self._writing_rotation = self._rotate_ if isinstance(self._rotate_, WritingRotation) else None
        self._qkv, self._out, self._mlp = parts.qkv, parts.out, parts.mlp

    def __call__(
        self, x_NE: Tensor, delta_NE: Tensor | None, rotations_N1C: Tensor, attend: AttentionStep
    ) -> Tensor:
        """Adds the previous layer's result (`delta_NE`) and this layer's attention to the residual stream, in place.
        Returns what this layer's MLP would add."""
        norm = self._attention_norm
        qkv = self._qkv(norm(x_NE) if delta_NE is None else norm.add_(x_NE, delta_NE))
        delta_NE = self._out(self._attend(qkv, rotations_N1C, attend))
        self._ranks.sum_(delta_NE)
        delta_NE = self._mlp(self._mlp_norm.add_(x_NE, delta_NE))
        self._ranks.sum_(delta_NE)
        return delta_NE

    def _attend(self, qkv: Tensor, rotations_N1C: Tensor, attend: AttentionStep) -> Tensor:
        """Rotates the heads and attends. Keys and values are written while keys are rotated, if rotation and attention
        support it."""
        heads, kv_heads, rows = self._num_heads, self._num_kv_heads, qkv.shape[0]
        qkv_NHD = qkv.view(rows, heads + 2 * kv_heads, self._head_dim)
        q_NHD = qkv_NHD[:, :heads]
        if self._writing_rotation is not None and isinstance(attend, OpenStep):
            self._writing_rotation.into(qkv_NHD, rotations_N1C, attend.target(self._index))
            return attend.attend(self._index, q_NHD, self._traits)
        self._rotate_(qkv_NHD[:, : heads + kv_heads], rotations_N1C)
        kv_N2KD = qkv_NHD[:, heads:].view(rows, 2, kv_heads, self._head_dim)
        return attend(self._index, q_NHD, kv_N2KD, self._traits)


class Decoder:
    """A CausalModel. With several ranks, each has the whole embedding and its share of the head's rows.

    `spec` is this rank's share (ModelSpec.shard), and so are the tensors of `source`. `parts` by layer, `final_norm_E`,
    `head` and `rotary` are for code that runs the model in another way.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        make_linear: LinearFactory,
        device: torch.device,
        activations: torch.dtype,
        ops: DecoderOps,
        ranks: RankGroup,
    ) -> None:
        self._activations = activations
        self._ranks = ranks
        self._embedding_VE = source.take("model.embed_tokens.weight").to(device)
        self.spec = spec
        self.parts = [
            LayerWeights(spec, index, source, make_linear, device, activations).parts(ops)
            for index in range(spec.num_layers)
        ]
        self._layers = [
            DecoderLayer(spec, index, parts, ops, ranks) for index, parts in enumerate(self.parts)
        ]
        self.final_norm_E = source.take("model.norm.weight").to(device, activations)
        self._norm = ops.norm(self.final_norm_E, spec.rms_norm_eps)
        self._vocab_size = spec.vocab_size
        head_vE = (
            vocabulary_share(self._embedding_VE, ranks.rank, ranks.size)
            if spec.tied_embeddings
            else source.take("lm_head.weight").to(device)
        )
        self.head = make_linear(head_vE, None)
        self.rotary = RotaryTable(spec.rope, spec.head_dim, spec.max_context_len, device)

    def embed(self, tokens_N: Tensor) -> Tensor:
        return F.embedding(tokens_N, self._embedding_VE).to(self._activations)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: AttentionStep) -> Tensor:
        x_NE = self.embed(tokens_N)
        rotations_N1C = self.rotary.rotations(positions_N)
        delta_NE = None
        for layer in self._layers:
            delta_NE = layer(x_NE, delta_NE, rotations_N1C, attend)
        return x_NE if delta_NE is None else x_NE.add_(delta_NE)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        return self._ranks.join(self.head(self._norm(hidden_RE)))[:, : self._vocab_size]


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
            traits=LayerTraits(
                spec.head_dim**-0.5, spec.windows[self._index], sinks_H=self.sinks() if spec.sinks else None
            ),
            attention_norm_E=self.vector("input_layernorm.weight"),
            mlp_norm_E=self.vector("post_attention_layernorm.weight"),
            head_norm_AD=self.qk_norm() if spec.qk_norm else None,
            qkv=self.qkv(),
            out=self.linear("self_attn.o_proj", spec.out_bias),
            mlp=self.mlp("mlp.", ops) if self._experts is None else self.experts(self._experts, ops),
        )

    def mlp(self, prefix: str, ops: DecoderOps) -> GatedMlp:
        return GatedMlp(self.gated(prefix, ops), self.linear(f"{prefix}down_proj", self._spec.mlp_bias))

    def experts(self, experts: ExpertsSpec, ops: DecoderOps) -> Experts:
        if experts.clamped is not None:
            prefix = f"{self._prefix}mlp.experts."
            stacked = StackedExperts(self._source, prefix, self._make_linear, self._device)
            mlps = stacked.mlps(experts.num_experts, experts.clamped)
            return Experts(self.linear("mlp.router", True), mlps, experts.top_k, experts.norm_topk)
        mlps = [self.mlp(f"mlp.experts.{index}.", ops) for index in range(experts.num_experts)]
        return Experts(self.linear("mlp.gate", False), mlps, experts.top_k, experts.norm_topk)

    def linear(self, name: str, has_bias: bool) -> Linear:
        return self._fused([name], has_bias, frozenset())

    def qkv(self) -> Linear:
        """Rows: queries, keys, values; rotary pairs interleaved in the first two."""
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        return self._fused(names, self._spec.qkv_bias, frozenset(names[:2]))

    def gated(self, prefix: str, ops: DecoderOps) -> Linear:
        names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
        has_bias, none = self._spec.mlp_bias, frozenset[str]()
        if not isinstance(self._make_linear, GatedLinears):
            return ActivatedLinear(self._fused(names, has_bias, none), ops.silu_mul)
        bias_O = self._stack(names, "bias", none) if has_bias else None
        if isinstance(self._make_linear, QuantizedGatedLinears):
            return self._make_linear.gated(self._weights(self._make_linear, names, none), bias_O)
        return self._make_linear.gated(self._stack(names, "weight", none), bias_O)

    def qk_norm(self) -> Tensor:
        """Per-head norm weights [H + K, D] of queries and keys."""
        spec = self._spec
        query_D = interleave_rotary(self.vector("self_attn.q_norm.weight"), spec.head_dim)
        key_D = interleave_rotary(self.vector("self_attn.k_norm.weight"), spec.head_dim)
        return torch.cat([query_D.expand(spec.num_heads, -1), key_D.expand(spec.num_kv_heads, -1)])

    def _fused(self, names: list[str], has_bias: bool, rotary: frozenset[str]) -> Linear:
        bias_O = self._stack(names, "bias", rotary) if has_bias else None
        if isinstance(self._make_linear, QuantizedLinears):
            return self._make_linear(self._weights(self._make_linear, names, rotary), bias_O)
        return self._make_linear(self._stack(names, "weight", rotary), bias_O)

    def _weights(
        self, linears: QuantizedLinears, names: list[str], rotary: frozenset[str]
    ) -> Tensor | QuantizedMatrix:
        """As they are stored if the products keep them so."""
        matrix = self._stack_quantized(names, rotary)
        if matrix is not None and linears.keeps(matrix):
            return matrix.to(self._device)
        return self._stack(names, "weight", rotary)

    def _stack_quantized(self, names: list[str], rotary: frozenset[str]) -> QuantizedMatrix | None:
        """None unless all of these are quantized, in one way and in equal blocks of inputs."""
        if not isinstance(self._source, QuantizedSource):
            return None
        parts = []
        for name in names:
            part = self._source.take_quantized(f"{self._prefix}{name}.weight")
            if part is None:
                return None
            if name in rotary:
                part = part.rearranged(partial(interleave_rotary, head_dim=self._spec.head_dim))
            parts.append(part)
        return stack_quantized(parts)

    def _stack(self, names: list[str], kind: str, rotary: frozenset[str]) -> Tensor:
        parts = [self._source.take(f"{self._prefix}{name}.{kind}") for name in names]
        for position, name in enumerate(names):
            if name in rotary:
                parts[position] = interleave_rotary(parts[position], self._spec.head_dim)
        return torch.cat(parts).to(self._device) if len(parts) > 1 else parts[0].to(self._device)
