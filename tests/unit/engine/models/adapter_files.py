"""Adapters' files with random weights, written by hand: for models that transformers need not load, and with faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.adapters import CONFIG_FILE, WEIGHTS_FILE
from engine.models.config import ModelSpec
from engine.models.tensor_shapes import tensor_shapes
from engine.settings import AdapterSettings

SPREAD = 0.08


def write_adapter(
    directory: Path,
    spec: ModelSpec,
    rank: int,
    updates: Callable[[str], bool] = lambda _: True,
    *,
    seed: int = 1,
    config: Mapping[str, Any] | None = None,
) -> AdapterSettings:
    """An adapter of the folder's name for the projections whose names it `updates`, but not for experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (*sizes,) in tensor_shapes(spec).items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and "experts" not in module and updates(module):
            outputs, inputs = sizes
            tensors |= {
                f"base_model.model.{module}.lora_A.weight": torch.randn(rank, inputs, generator=generator)
                * SPREAD,
                f"base_model.model.{module}.lora_B.weight": torch.randn(outputs, rank, generator=generator)
                * SPREAD,
            }
    write_files(directory, tensors, {"r": rank, "lora_alpha": 2 * rank, **(config or {})})
    return AdapterSettings(directory.name, str(directory))


def write_files(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    save_file(dict(tensors), directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", **config}))
