"""Whether a device can run Triton's kernels, and which small operators it runs."""

from __future__ import annotations

import logging
import os

import torch

from engine.device import compute_capability
from engine.models.ops import DecoderOps, TorchOps

FIRST_WITH_FP8 = 89
"""The first compute capability on which Triton can convert float8_e4m3fn."""

logger = logging.getLogger(__name__)


def triton_trouble(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on the device; None if they can.

    This runs one. Triton compiles what launches a kernel with a C compiler of the machine, which may have none. Without
    this, a replica would fail in the middle of its start, or of a step.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs a GPU, or on a CPU Triton's interpreter (TRITON_INTERPRET=1)"
    try:
        # This imports triton, which machines without a GPU need not have.
        from engine.kernels.trial import write_one

        write_one(device)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # of Triton, of the compiler that it calls, or of the driver
        return f"a first kernel did not run: {type(error).__name__}: {error}"
    return None


def triton_build(device: torch.device) -> str:
    """What the order of the kernels' sums depends on. Only where Triton's kernels can run."""
    import triton

    return f"triton {triton.__version__}, compute capability {compute_capability(device)}"


def choose_ops(device: torch.device) -> DecoderOps:
    """Fused kernels on a GPU where Triton works, torch's own operators elsewhere."""
    if device.type != "cuda":
        return TorchOps()
    trouble = triton_trouble(device)
    if trouble is not None:
        logger.warning("torch's operators are used instead of fused kernels, triton: %s", trouble)
        return TorchOps()
    from engine.kernels.decoder_ops import TritonOps

    return TritonOps()
