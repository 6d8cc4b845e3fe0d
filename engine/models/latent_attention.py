"""Multi-head latent attention (DeepSeek-V2, 2024), on the latents themselves.

A head's plain key features are a product of the latent, so a query's plain features times that product's matrix are a
query for the latent. Values follow from latents by a product, too, which is applied to what attention has summed. So a
token's KV in a layer is one vector for all heads: latent, then the features that have the position.

Legend: N tokens, E hidden size, H heads, L features of a latent, P rotary features, D = L + P, Q plain and rotary
features of a query, V features of a value, C = P / 2 rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import AttentionStep, LayerTraits
from engine.models.latent_config import LatentSpec
from engine.models.linear import Linear
from engine.models.ops import Norm, Rotation


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """`down` is one product for queries, or their latents, and for key latents and rotary features. `query_up` makes
    queries of their latents. By head are `key_ups`, [plain] to [L], and `value_ups`, [L] to [V]. `plain_ups`, [L] to
    [plain], are for code that makes the keys themselves, for many queries. `latent_norm_L` and `query_norm` are the
    weights of the norms of latents."""

    traits: LayerTraits
    latent: LatentSpec
    num_heads: int
    down: Linear
    query_up: Linear | None
    query_norm: Tensor | None
    latent_norm_L: Tensor
    key_ups: Sequence[Linear]
    value_ups: Sequence[Linear]
    plain_ups: Sequence[Linear]
    normalise_query: Norm | None
    normalise_latent: Norm
    rotate: Rotation

    def __call__(self, layer: int, x_NE: Tensor, rotations_N1C: Tensor, attend: AttentionStep) -> Tensor:
        """Returns [N, H * V]."""
        rank, rows = self.latent.rank, x_NE.shape[0]
        query, key_ND = self.down(x_NE).tensor_split((-self.latent.key_dim,), -1)
        if self.query_up is not None and self.normalise_query is not None:
            query = self.query_up(self.normalise_query(query))
        q_NHD = self._queries(query.reshape(rows, self.num_heads, self.latent.query_dim), rotations_N1C)
        rotary_N1P = key_ND[:, None, rank:].clone(memory_format=torch.contiguous_format)
        self.rotate(rotary_N1P, rotations_N1C)
        kv_NJKD = torch.cat((self.normalise_latent(key_ND[:, :rank]), rotary_N1P[:, 0]), -1)[:, None, None]
        latents_NHL = attend(layer, q_NHD, kv_NJKD, self.traits).view(rows, self.num_heads, rank)
        return torch.cat(
            [up(latents_NHL[:, head].contiguous()) for head, up in enumerate(self.value_ups)], -1
        )

    def _queries(self, q_NHQ: Tensor, rotations_N1C: Tensor) -> Tensor:
        """Queries for latents [N, H, D]."""
        plain_dim = self.latent.plain_dim
        rotary_NHP = q_NHQ[..., plain_dim:].clone(memory_format=torch.contiguous_format)
        self.rotate(rotary_NHP, rotations_N1C)
        plain_NHL = torch.stack(
            [up(q_NHQ[:, head, :plain_dim].contiguous()) for head, up in enumerate(self.key_ups)], 1
        )
        return torch.cat((plain_NHL, rotary_NHP), -1)
