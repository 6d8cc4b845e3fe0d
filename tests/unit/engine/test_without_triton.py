"""A machine without Triton is able to serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["triton"] = None
import torch, engine.build, engine.attention.choose, engine.models.loader
assert "engine.attention.triton_backend" not in sys.modules
from engine.kernels.choose import choose_ops
from engine.models.device_linear import choose_linears
print(*(type(choose_ops(torch.device(kind))).__name__ for kind in ("cpu", "cuda")))
print(choose_linears("auto", torch.device("cuda", 0), torch.bfloat16).describe())
"""


def test_torch_does_it_all() -> None:
    """Loading a model and choosing for a CPU import no kernels."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.stdout.startswith("TorchOps TorchOps\n"), done.stderr[-2000:]
    assert "triton is not installed" in done.stdout
