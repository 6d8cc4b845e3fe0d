"""Multi-head latent attention (DeepSeek-V2, 2024), as a config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config_values import positive_integer, positive_number, truth
from engine.models.errors import UnsupportedModel
from engine.models.rope import RopeSpec, rope_parameters, yarn_magnitude

NORM_EPS = 1e-6
"""Of the norms before the second products, whatever rms_norm_eps is."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A token has one latent for all heads, of `rank` features, and `rotary_dim` features that have its position. From
    the latent follow each head's other `plain_dim` features of the key, and its value of `value_dim`. With `query_rank`
    queries have a latent, too. `scale` multiplies the scores. `interleaved`: in the checkpoint the two features of a
    rotary pair are neighbours."""

    query_rank: int | None
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    interleaved: bool

    @property
    def key_dim(self) -> int:
        """Features that the KV cache has of a token in a layer: the latent first."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Features of a head's query before its plain ones become a query for latents."""
        return self.plain_dim + self.rotary_dim


def parse_latent(config: Mapping[str, Any], rope: RopeSpec) -> LatentSpec:
    """Raises UnsupportedModel that names the key."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedModel(f"config.json: {key} is not implemented beside latent attention")
    heads = positive_integer(config, "num_attention_heads")
    if config.get("num_key_value_heads") not in (None, heads):
        raise UnsupportedModel(f"config.json: num_key_value_heads must be the {heads} of num_attention_heads")
    query_rank = config.get("q_lora_rank")
    plain_dim, rotary_dim = (
        positive_integer(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    if rotary_dim % 2:
        raise UnsupportedModel(f"config.json: qk_rope_head_dim must be even, not {rotary_dim}")
    return LatentSpec(
        query_rank=None if query_rank is None else positive_integer(config, "q_lora_rank"),
        rank=positive_integer(config, "kv_lora_rank"),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=positive_integer(config, "v_head_dim"),
        scale=(plain_dim + rotary_dim) ** -0.5 * _stretched_scale(config, rope),
        interleaved=truth(config, "rope_interleave", True),
    )


def _stretched_scale(config: Mapping[str, Any], rope: RopeSpec) -> float:
    """Where the context is stretched, scores are multiplied by what `mscale_all_dim` makes of it."""
    parameters = rope_parameters(config)
    if rope.type == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(rope.factor, positive_number(parameters, "mscale_all_dim", 1.0)) ** 2
