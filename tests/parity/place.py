"""The device for the parity tests: a GPU if there is one, else the CPU. transformers always runs on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.device import resolve_device
from engine.kernels.choose import choose_ops
from engine.models.loader import LoadedModel, load_model
from engine.runner.protocol import Runner
from engine.runner.torch_runner import TorchRunner
from engine.settings import DTypeName, ModelSettings

DEVICE = torch.device(os.environ.get("KEDGE_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu"))
"""KEDGE_TEST_DEVICE may be `cpu` or `cuda`."""


def load_here(directory: Path, dtype: DTypeName = "float32") -> LoadedModel:
    """Loads the model as a replica on this device does, with fused operators."""
    device = resolve_device("cuda" if DEVICE.type == "cuda" else "cpu")
    settings = ModelSettings(str(directory), dtype=dtype, device=device.type, num_threads=1)  # type: ignore[arg-type]
    return load_model(settings, ops=choose_ops(device))


def careful(runner: Runner) -> TorchRunner:
    """The runner that has the KV pools. On a GPU another runner wraps it."""
    inner = getattr(runner, "_careful", runner)
    assert isinstance(inner, TorchRunner)
    return inner
