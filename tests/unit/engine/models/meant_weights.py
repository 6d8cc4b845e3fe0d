"""Checkpoints that store weights in another form are the model that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from test_loader import load, run_logits, write_config
from torch import Tensor

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


def check_model(directory: Path, meant: dict[str, Tensor], changes: dict[str, Any]) -> None:
    """The model computes what that of the weights in `meant` does. `changes` are those of its config.json."""
    (plain := directory / "plain").mkdir()
    write_config(plain, **changes)
    save_file(meant, plain / "model.safetensors")
    expected, found = load(plain, dtype="float32"), load(directory, dtype="float32")
    assert found.native
    assert found.about["linear"] != "cpu" or "quantized" in found.about
    assert torch.equal(run_logits(found), run_logits(expected))
    assert found.fingerprint != expected.fingerprint, "their files differ, so may their KV"
