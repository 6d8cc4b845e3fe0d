"""Adapters: low-rank updates of a model's matrices (LoRA, Hu et al. 2021), as PEFT stores them.

A request names the adapter that it wants. All requests share the model's weights, whichever adapters they have, and a
step may have rows of several.

Legend: I inputs of a matrix, O outputs, R rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import ModelSpec, read_json
from engine.models.errors import BadCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from engine.models.fingerprint import FINGERPRINT_BYTES
from engine.models.hub import find_model
from engine.models.tensor_shapes import tensor_shapes
from engine.settings import AdapterSettings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DEFAULT = 8
"""What PEFT takes for `r` and for `lora_alpha` if they are left out."""

_TENSOR = re.compile(
    r"base_model\.model\.(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.lora_([AB])\.weight"
)
_READ = frozenset(
    {"peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights"}
)
_WITHOUT_EFFECT = frozenset(
    {
        # How it was trained, or made.
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
        # Which matrices it updates: its tensors tell.
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
_STARTS_THAT_KEEP_THE_MODEL = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights as they are. Others, such as PiSSA's, change them."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixUpdate:
    """y += b(a(x)). The adapter's scale is in `b_OR`."""

    a_RI: Tensor
    b_OR: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """`updates` is by the name of a matrix without its ending, such as "model.layers.0.self_attn.q_proj".
    `fingerprint` is that of the updates: adapters that compute the same have the same."""

    name: str
    fingerprint: str
    updates: Mapping[str, MatrixUpdate]


def read_adapters(
    settings: Sequence[AdapterSettings], spec: ModelSpec, dtype: torch.dtype
) -> tuple[Adapter, ...]:
    """The adapters of a model that is held in `dtype`. They are rounded to it, `b` with its scale. Raises ModelError,
    which names the adapter."""
    return tuple(_named(each, spec, dtype) for each in settings)


def _named(settings: AdapterSettings, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    try:
        return _read(settings, spec, dtype)
    except ModelError as error:
        raise type(error)(f"model.adapters.{settings.name}: {error}") from error


def _read(settings: AdapterSettings, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    directory = find_model(settings.path)
    config_file, weights_file = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config_file, weights_file):
        if not path.is_file():
            raise ModelNotFound(f"{directory}: no {path.name}")
    config = read_json(config_file)
    _check_config(config)
    tensors = dict(_tensors(weights_file, spec))
    if not tensors:
        raise BadCheckpoint(f"{weights_file}: it updates nothing")
    updates = {}
    for module in sorted({module for module, _ in tensors}):
        if (module, "A") not in tensors or (module, "B") not in tensors:
            raise BadCheckpoint(f"{weights_file}: {module} has only one of lora_A and lora_B")
        a_RI, b_OR = tensors[module, "A"], tensors[module, "B"]
        rank = _number(config, "r", "rank_pattern", module)
        if rank < 1 or (len(a_RI), b_OR.shape[1]) != (rank, rank):
            raise BadCheckpoint(
                f"{weights_file}: {module} has ranks {len(a_RI)} and {b_OR.shape[1]}, and {rank} in {CONFIG_FILE}"
            )
        alpha = _number(config, "lora_alpha", "alpha_pattern", module)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        update = MatrixUpdate(a_RI.to(dtype), (b_OR.float() * scale).to(dtype))
        if not (update.a_RI.isfinite().all() and update.b_OR.isfinite().all()):
            raise BadCheckpoint(f"{weights_file}: {module} is not finite in {dtype}")
        updates[module] = update
    return Adapter(settings.name, _fingerprint(updates), updates)


def _fingerprint(updates: Mapping[str, MatrixUpdate]) -> str:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    for name, update in sorted(updates.items()):
        for tensor in (update.a_RI, update.b_OR):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuses what would be computed in another way."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(
            f"{CONFIG_FILE}: peft_type {config.get('peft_type')!r}: only 'LORA' is supported"
        )
    start = config.get("init_lora_weights")
    if start not in _STARTS_THAT_KEEP_THE_MODEL:
        raise UnsupportedModel(
            f"{CONFIG_FILE}: init_lora_weights {start!r} changes the model's own weights: convert the adapter to one "
            "for the unchanged model"
        )
    if config.get("use_rslora") not in (None, True, False):
        raise UnsupportedModel(
            f"{CONFIG_FILE}: use_rslora {config['use_rslora']!r}: true or false is expected"
        )
    for key, value in config.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, "none", [], {}):
            raise UnsupportedModel(f"{CONFIG_FILE}: {key} {value!r} is not supported")


def _tensors(path: Path, spec: ModelSpec) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Each tensor by its matrix and A or B. Checks its name and its shape but for the rank."""
    shapes = tensor_shapes(spec)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                found = _TENSOR.fullmatch(name)
                shape = None if found is None else shapes.get(f"{found[1]}.weight")
                if found is None or shape is None:
                    raise UnsupportedModel(
                        f"{path.name}: {name}: only the projections of attention and of a layer's one MLP can be "
                        "updated"
                    )
                tensor = file.get_tensor(name)
                axis, wanted = (1, shape[1]) if found[2] == "A" else (0, shape[0])
                if tensor.dim() != 2 or tensor.shape[axis] != wanted:
                    raise BadCheckpoint(
                        f"{path.name}: {name} is {tuple(tensor.shape)}, and the model's matrix {shape}"
                    )
                yield (found[1], found[2]), tensor
    except SafetensorError as error:
        raise BadCheckpoint(f"{path}: not a safetensors file: {error}") from error


def _number(config: Mapping[str, Any], key: str, patterns_key: str, module: str) -> float:
    """The number that the first pattern has which the matrix's name ends with, as in PEFT; that of `key` if none
    does."""
    value, patterns = config.get(key, DEFAULT), config.get(patterns_key) or {}
    if not isinstance(patterns, Mapping):
        raise UnsupportedModel(f"{CONFIG_FILE}: {patterns_key} {patterns!r}: a map of patterns is expected")
    for pattern, own in patterns.items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise UnsupportedModel(
                f"{CONFIG_FILE}: {patterns_key} {pattern!r}: no pattern: {error}"
            ) from error
        if fits:
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModel(
            f"{CONFIG_FILE}: {key} or {patterns_key} {value!r} for {module}: a number is expected"
        )
    return value
