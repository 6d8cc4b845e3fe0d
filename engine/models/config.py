"""Reads a Hugging Face config.json into the description that the decoder is built from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.models.config_values import positive_integer, positive_number, truth, whole_number
from engine.models.errors import ModelNotFound, UnsupportedModel
from engine.models.experts_config import ExpertsSpec, parse_experts
from engine.models.fp8_weights import Fp8Format, parse_fp8
from engine.models.latent_config import LatentSpec, parse_latent
from engine.models.mxfp4_weights import Mxfp4Format, parse_mxfp4
from engine.models.packed_weights import PackedFormat, parse_packed
from engine.models.registry import Family, find_family
from engine.models.rope import RopeSpec, parse_rope, rope_parameters
from engine.runner.kv_pool import KVLayout

CheckpointDType = Literal["float32", "bfloat16", "float16"]

DEFAULT_WINDOW = 4096
"""Tokens, where config.json leaves sliding_window out."""

DEFAULT_FIRST_WINDOW_LAYER = 28
"""Where config.json leaves max_window_layers out."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, rotary attention and a gated SiLU MLP, or experts.

    `num_heads` queries share `num_kv_heads` keys and values, `head_dim` wide each; with `latent` all share one key that
    is as wide as the latent and its rotary features. `windows` has each layer's sliding window in tokens, None where it
    sees everything.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_context_len: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    checkpoint_dtype: CheckpointDType
    fp8: Fp8Format | None
    """How matrices in fp8 are stored; None if there are none."""
    packed: PackedFormat | Mxfp4Format | None
    """How matrices of packed integers, or experts in MXFP4, are stored; None if there are none."""
    experts: ExpertsSpec | None
    sinks: bool
    """Whether heads have attention sinks."""
    latent: LatentSpec | None = None
    num_mtp_layers: int = 0
    """Layers behind the last that predict more tokens at once. They are not read."""

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def is_quantized(self) -> bool:
        return self.fp8 is not None or self.packed is not None

    @property
    def kv_layout(self) -> KVLayout:
        latent_dim = None if self.latent is None else self.latent.rank
        return KVLayout(self.num_kv_heads, self.head_dim, self.windows, latent_dim)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.latent is None else self.latent.scale

    def shard(self, size: int) -> ModelSpec:
        """What each of `size` ranks holds: its share of the heads and of the MLP; the vocabulary stays whole.

        With fewer key/value heads than ranks, several ranks hold the same head. Raises UnsupportedModel that names the
        field that cannot be divided.
        """
        if size == 1:
            return self
        for what, found in (("experts", self.experts), ("latents of attention", self.latent)):
            if found is not None:
                raise UnsupportedModel(f"tensor_parallel {size}: {what} cannot be shared out to ranks")
        for field, count in (
            ("num_attention_heads", self.num_heads),
            ("intermediate_size", self.intermediate_size),
        ):
            if count % size:
                raise UnsupportedModel(f"{field} {count} cannot be shared out to {size} ranks")
        heads = self.num_kv_heads
        if heads % size and size % heads:
            raise UnsupportedModel(f"num_key_value_heads {heads} cannot be shared out to {size} ranks")
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, heads // size),
            intermediate_size=self.intermediate_size // size,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Raises UnsupportedModel if the file is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return content


def read_config(directory: Path) -> dict[str, Any]:
    """Raises ModelNotFound without a config.json, UnsupportedModel if it is not a JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{directory}: no config.json")
    return read_json(path)


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """`config` is the parsed config.json. Raises UnsupportedModel that names what no native family implements."""
    family = find_family(config)
    context_len = positive_integer(config, "max_position_embeddings", 2048)
    rope = parse_rope(config, context_len)
    context_len = max(context_len, rope.stretched_len)
    _refuse_unknown(config, family)
    num_heads = positive_integer(config, "num_attention_heads")
    num_layers = positive_integer(config, "num_hidden_layers")
    packed = parse_mxfp4(config) if family.experts == "gpt_oss" else parse_packed(config)
    hidden_size = positive_integer(config, "hidden_size")
    default_head_dim = family.default_head_dim or hidden_size // num_heads
    latent = parse_latent(config, rope) if family.latent else None
    spec = ModelSpec(
        vocab_size=positive_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if latent else _kv_heads(config, family, num_heads),
        head_dim=latent.key_dim if latent else positive_integer(config, "head_dim", default_head_dim),
        rms_norm_eps=positive_number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_context_len=context_len,
        tied_embeddings=truth(config, "tie_word_embeddings", False),
        qkv_bias=_flag(config, "attention_bias", family, family.qkv_bias),
        out_bias=_flag(config, "attention_bias", family, False),
        mlp_bias=_flag(config, "mlp_bias", family, False),
        qk_norm=family.qk_norm,
        windows=_parse_windows(config, family, num_layers, context_len),
        checkpoint_dtype=_parse_dtype(config),
        fp8=parse_fp8(config) if packed is None else None,
        packed=packed,
        experts=parse_experts(config, family, num_layers),
        sinks=family.sinks,
        latent=latent,
        num_mtp_layers=whole_number(config, "num_nextn_predict_layers"),
    )
    if spec.num_heads % spec.num_kv_heads or spec.rotary_dim % 2 or not spec.rotary_dim:
        raise UnsupportedModel(
            f"config.json: num_attention_heads {spec.num_heads}, num_key_value_heads {spec.num_kv_heads}, head_dim "
            f"{spec.head_dim}: heads must divide evenly, and their size must be even"
        )
    return spec


def _kv_heads(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    """Null stands for as many as there are heads, a missing key for the family's number."""
    missing = "num_key_value_heads" not in config
    default = family.default_kv_heads if missing and family.default_kv_heads else num_heads
    return positive_integer(config, "num_key_value_heads", default)


def _flag(config: Mapping[str, Any], key: str, family: Family, fixed: bool) -> bool:
    """Some families read a bias flag; the others have it built in and ignore the key."""
    return truth(config, key, family.default_bias) if key in family.bias_keys else fixed


def _refuse_unknown(config: Mapping[str, Any], family: Family) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r}: only 'silu' is implemented")
    found = config.keys() | rope_parameters(config).keys()
    if not family.required <= found:
        missing = ", ".join(sorted(family.required - found))
        raise UnsupportedModel(f"config.json of {family.name} lacks {missing}")


def _parse_windows(
    config: Mapping[str, Any], family: Family, num_layers: int, context_len: int
) -> tuple[int | None, ...]:
    """Windows by layer. A window as long as the context counts as none."""
    window = None
    if family.window in ("always", "by layer") or (
        family.window != "never" and truth(config, "use_sliding_window", False)
    ):
        window = config.get("sliding_window", DEFAULT_WINDOW)
    if window is not None and (type(window) is not int or window < 1):
        raise UnsupportedModel(f"config.json: sliding_window must be a positive integer, not {window!r}")
    if window is None or window >= context_len:
        return (None,) * num_layers
    if family.window not in ("flag", "by layer"):
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None and family.window == "by layer":
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    if kinds is None:
        first = whole_number(config, "max_window_layers", DEFAULT_FIRST_WINDOW_LAYER)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UnsupportedModel(f"config.json: layer_types must be a list of texts, not {kinds!r}")
    unknown = sorted({*kinds} - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types of {len(kinds)} layers with {unknown}: not understood")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _parse_dtype(config: Mapping[str, Any]) -> CheckpointDType:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    for known in get_args(CheckpointDType):
        if name == known:
            return cast(CheckpointDType, known)
    raise UnsupportedModel(f"dtype {name!r} is not implemented")
