"""The smallest kernel, to learn whether Triton's kernels can run on a device."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_one(out_1):
    tl.store(out_1, 1)


def write_one(device: torch.device) -> None:
    """Compiles and runs the kernel, and waits for it. Raises whatever Triton, its compiler or the driver raises."""
    out_1 = torch.zeros(1, dtype=torch.int32, device=device)
    _write_one[(1,)](out_1)
    if out_1.item() != 1:
        raise RuntimeError("it has written nothing")
