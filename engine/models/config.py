"""Reads a Hugging Face config.json into the one description the decoder is built from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.models.errors import ModelNotFound, UnsupportedModel
from engine.models.registry import Family, find_family

RopeType = Literal["default", "linear", "llama3"]
CheckpointDType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base `theta` and how its frequencies are stretched."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, rotary attention and a gated SiLU MLP.

    `num_heads` queries share `num_kv_heads` keys and values, `head_dim` wide each.
    """

    family: str
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
    checkpoint_dtype: CheckpointDType

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers of KV one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """Raises UnsupportedModel if the file is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return content


def read_spec(directory: Path) -> ModelSpec:
    """Raises ModelNotFound without a config.json, UnsupportedModel naming what is not implemented."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{directory}: no config.json")
    return parse_spec(read_json(path))


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """`config` is the parsed config.json."""
    family = find_family(config)
    context_len = int(config.get("max_position_embeddings") or 2048)
    _refuse_unknown(config, family, context_len)
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    spec = ModelSpec(
        family=family.name,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads", family.default_kv_heads) or num_heads),
        head_dim=int(config.get("head_dim") or family.default_head_dim or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config, context_len),
        max_context_len=context_len,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_flag(config, "attention_bias", family, family.qkv_bias),
        out_bias=_flag(config, "attention_bias", family, False),
        mlp_bias=_flag(config, "mlp_bias", family, False),
        qk_norm=family.qk_norm,
        checkpoint_dtype=_parse_dtype(config),
    )
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise UnsupportedModel(
            f"{spec.num_heads} heads of {spec.head_dim} over {spec.num_kv_heads} key/value heads: "
            "heads must divide evenly, and their size must be even"
        )
    return spec


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str, family: Family, fixed: bool) -> bool:
    """Some families read a bias flag; the others have it built in and ignore the key."""
    return bool(config.get(key, False)) if key in family.bias_keys else fixed


def _refuse_unknown(config: Mapping[str, Any], family: Family, context_len: int) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r}: only 'silu' is implemented")
    if config.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantized checkpoints are not implemented")
    window = _sliding_window(config, family)
    if window is not None and window < context_len:
        raise UnsupportedModel(
            f"sliding_window {window} is smaller than the context of {context_len} tokens: "
            "sliding-window attention is not implemented"
        )


def _sliding_window(config: Mapping[str, Any], family: Family) -> int | None:
    """The window of the layers that have one, in tokens."""
    kinds = set(config.get("layer_types") or ())
    if family.window == "never" or (kinds and kinds <= {"full_attention"}):
        return None
    if family.window == "flag" and not config.get("use_sliding_window", False):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def _parse_rope(config: Mapping[str, Any], context_len: int) -> RopeSpec:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope scaling {kind!r} is not implemented (default, linear and llama3 are)")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not implemented")
    return RopeSpec(
        theta=float(parameters.get("rope_theta", config.get("rope_theta", 10_000.0))),
        type=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_context_len=int(parameters.get("original_max_position_embeddings", context_len)),
    )


def _parse_dtype(config: Mapping[str, Any]) -> CheckpointDType:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    for known in get_args(CheckpointDType):
        if name == known:
            return cast(CheckpointDType, known)
    raise UnsupportedModel(f"dtype {name!r} is not implemented")
