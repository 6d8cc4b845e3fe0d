"""Where parity is judged: on a card if there is one, else on the CPU. transformers' side is always on the CPU."""

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
"""The environment's choice is cpu or cuda."""


def load_here(directory: Path, dtype: DTypeName = "float32") -> LoadedModel:
    """As a replica on this device loads it, fused operators included."""
    device = resolve_device("cuda" if DEVICE.type == "cuda" else "cpu")
    settings = ModelSettings(str(directory), dtype=dtype, device=device.type, num_threads=1)  # type: ignore[arg-type]
    return load_model(settings, ops=choose_ops(device))


def careful(runner: Runner) -> TorchRunner:
    """The runner that has the pools: on a card another is around it."""
    inner = getattr(runner, "_careful", runner)
    assert isinstance(inner, TorchRunner)
    return inner
