"""The one decoder that all native families use.

Legend: N tokens, E hidden size, V vocabulary, v = V / ranks rounded up, R rows of which logits are wanted, C rotary
frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.interface import AttentionStep
from engine.models.config import ModelSpec
from engine.models.layer_weights import LayerParts, LayerWeights
from engine.models.layers import RotaryTable
from engine.models.linear import LinearFactory
from engine.models.ops import DecoderOps
from engine.models.shares import vocabulary_share
from engine.models.weights import WeightSource
from engine.parallel.ranks import RankGroup


class DecoderLayer:
    """Attention and MLP with their residuals.

    With several ranks, each has its share of the heads and of the MLP; what they add to the residual stream is summed.
    """

    def __init__(
        self, spec: ModelSpec, index: int, parts: LayerParts, ops: DecoderOps, ranks: RankGroup
    ) -> None:
        self._index = index
        self._ranks = ranks
        self._attention_norm = ops.norm(parts.attention_norm_E, spec.rms_norm_eps)
        self._mlp_norm = ops.norm(parts.mlp_norm_E, spec.rms_norm_eps)
        self._attention, self._out, self._mlp = parts.attention, parts.out, parts.mlp

    def __call__(
        self, x_NE: Tensor, delta_NE: Tensor | None, rotations_N1C: Tensor, attend: AttentionStep
    ) -> Tensor:
        """Adds the previous layer's result (`delta_NE`) and this layer's attention to the residual stream, in place.
        Returns what this layer's MLP would add."""
        norm = self._attention_norm
        normed_NE = norm(x_NE) if delta_NE is None else norm.add_(x_NE, delta_NE)
        delta_NE = self._out(self._attention(self._index, normed_NE, rotations_N1C, attend))
        self._ranks.sum_(delta_NE)
        delta_NE = self._mlp(self._mlp_norm.add_(x_NE, delta_NE))
        self._ranks.sum_(delta_NE)
        return delta_NE


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
        self.rotary = RotaryTable(spec.rope, spec.rotary_dim, spec.max_context_len, device)

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
