"""Which small operators a device runs."""

from __future__ import annotations

import importlib.util

import torch

from engine.models.ops import DecoderOps, TorchOps


def choose_ops(device: torch.device) -> DecoderOps:
    """Fused kernels on a GPU where Triton is installed, torch's own operators elsewhere."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return TorchOps()
    # This imports triton, which machines without a GPU need not have.
    from engine.kernels.decoder_ops import TritonOps

    return TritonOps()
