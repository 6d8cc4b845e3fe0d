"""Checkpoints that store weights in another form are the model that they mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from test_loader import load, run_logits, write_config
from torch import Tensor

from engine.cpu.library import Kernels, find_kernels
from engine.models.config import parse_spec, read_config
from engine.models.shares import Shares
from engine.models.weights import CheckpointWeights


def check_each_weight(directory: Path, meant: dict[str, Tensor], ranks: int) -> None:
    """Each of `ranks` reads its part of the weights in `meant`."""
    spec, cpu = parse_spec(read_config(directory)), torch.device("cpu")
    for rank in range(ranks):
        shares = Shares(spec, rank, ranks)
        source = CheckpointWeights(directory, spec, torch.float32, cpu, shares)
        for name, expected in meant.items():
            part = shares.part(name)
            assert torch.equal(source.take(name), expected if part is None else part.of(expected)), name
        source.close()


def check_model(
    directory: Path, meant: dict[str, Tensor], changes: dict[str, Any], kept: int | None = None
) -> None:
    """The model computes what that of the weights in `meant` does. `changes` are those of its config.json. So many
    matrices stay as they are stored: all projections, or `kept`."""
    (plain := directory / "plain").mkdir()
    write_config(plain, **changes)
    save_file(meant, plain / "model.safetensors")
    expected, found = load(plain, dtype="float32"), load(directory, dtype="float32")
    assert found.native
    if isinstance(find_kernels(), Kernels):
        count = kept or len({fused(name) for name in meant if name.endswith("_proj.weight")})
        assert found.about["quantized"].startswith(f"{count} matrices of "), "all of them, also what is fused"
    assert torch.equal(run_logits(found), run_logits(expected))
    assert found.fingerprint != expected.fingerprint, "their files differ, so may their KV"


def fused(name: str) -> str:
    """Matrices that are applied to the same rows are one."""
    return re.sub(r"\b[qkv]_proj", "qkv", re.sub(r"\b(gate|up)_proj", "gate_up", name))
