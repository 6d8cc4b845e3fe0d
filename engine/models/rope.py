"""Rotary frequencies, and how a configuration stretches them for contexts longer than those of the training.

Legend: D head size, C = D / 2 rotary frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.models.config_values import positive_number, truth
from engine.models.errors import UnsupportedModel

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base `theta`, and how its frequencies are stretched by `factor`: linearly, as Llama 3 does, which has
    `low_freq_factor` and `high_freq_factor`, or by YaRN (Peng et al. 2023), which has the others. YaRN also multiplies
    queries and keys by `attention_factor`."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @property
    def stretched_len(self) -> int:
        """Tokens that YaRN stretches the context to; 0 without it."""
        return int(self.original_context_len * self.factor) if self.type == "yarn" else 0


def parse_rope(config: Mapping[str, Any], context_len: int) -> RopeSpec:
    """Raises UnsupportedModel that names the key."""
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModel(
            f"rope scaling {kind!r} is not implemented (default, linear, llama3 and yarn are)"
        )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not implemented")
    theta = positive_number(parameters, "rope_theta", positive_number(config, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeSpec(theta)
    length = "original_max_position_embeddings"
    outer_len = positive_number(config, length, 0, least=1)  # goes first, as in transformers
    original_len = int(outer_len or positive_number(parameters, length, context_len, least=1))
    factor = positive_number(parameters, "factor", context_len / original_len if kind == "yarn" else 1.0)
    if kind == "yarn" and theta <= 1:
        raise UnsupportedModel(f"config.json: rope_theta must be above 1 for yarn, not {theta:g}")
    return RopeSpec(
        theta=theta,
        type=kind,
        factor=factor,
        low_freq_factor=positive_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=positive_number(parameters, "high_freq_factor", 4.0),
        original_context_len=original_len,
        beta_fast=positive_number(parameters, "beta_fast", 32.0),
        beta_slow=positive_number(parameters, "beta_slow", 1.0),
        truncate=truth(parameters, "truncate", True),
        attention_factor=_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
    )


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_scaling` (before), which lacks `rope_theta`. Raises
    UnsupportedModel."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"config.json: rope_scaling must be an object, not {found!r}")
    return found


def rotary_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position, float32 [C]."""
    exponents_C = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods_C = spec.theta**exponents_C
    frequencies_C = 1.0 / periods_C
    if spec.type == "linear":
        return frequencies_C / spec.factor
    if spec.type == "llama3":
        return _stretch_llama3(frequencies_C, spec)
    if spec.type == "yarn":
        return _stretch_yarn(frequencies_C, 1.0 / (spec.factor * periods_C), spec)
    return frequencies_C


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """As transformers reads it: `attention_factor`, else from `mscale` and `mscale_all_dim` if there are both, else
    from the factor, as the paper has it."""
    if parameters.get("attention_factor") is not None:
        return positive_number(parameters, "attention_factor", 1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        whole = yarn_magnitude(factor, positive_number(parameters, "mscale_all_dim", 1.0))
        return yarn_magnitude(factor, positive_number(parameters, "mscale", 1.0)) / whole
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    """How much longer YaRN makes vectors whose context is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _stretch_llama3(frequencies_C: Tensor, spec: RopeSpec) -> Tensor:
    """Slows waves longer than the original context by `factor`, keeps short ones, blends those in between."""
    turns_C = spec.original_context_len * frequencies_C / (2 * math.pi)
    span = spec.high_freq_factor - spec.low_freq_factor
    keep_C = ((turns_C - spec.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep_C * frequencies_C + (1.0 - keep_C) * frequencies_C / spec.factor


def _stretch_yarn(frequencies_C: Tensor, slowed_C: Tensor, spec: RopeSpec) -> Tensor:
    """Keeps waves that turn `beta_fast` times or more in the original context, slows those that turn `beta_slow` times
    or less, and blends those in between by their place."""
    count = len(frequencies_C)
    first, last = _yarn_place(spec.beta_fast, count, spec), _yarn_place(spec.beta_slow, count, spec)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    span = last - first or 0.001
    keep_C = 1.0 - ((torch.arange(count, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    return slowed_C * (1.0 - keep_C) + frequencies_C * keep_C


def _yarn_place(turns: float, count: int, spec: RopeSpec) -> float:
    """Which of the frequencies turns so many times in the original context."""
    waves = spec.original_context_len / (turns * 2 * math.pi)
    return count * math.log(waves) / math.log(spec.theta)
