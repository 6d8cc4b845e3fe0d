"""Programmatic dependent launch, from compute capability 9.0 on: a kernel's programs start while the last ones of the
kernel before it end, and wait in themselves for what it wrote.

A decode of one row is some 200 kernels of a few microseconds, and on an H200 the next one's start took the more part
of another. Every program of a kernel that is launched with `early_options` calls `wait_for_previous` before it reads or
writes what another kernel of the stream may write. So if a kernel has ended, all before it have.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.device import compute_capability

FIRST_WITH_EARLY = 90
"""The first compute capability that has it."""


@cache
def early_options(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch on the device: the kernel's constant EARLY, and what the launch needs for it."""
    if (compute_capability(device) or 0) < FIRST_WITH_EARLY:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Waits until the kernels before this one have ended."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Once all programs have said so, or ended, the next kernel's may start. Said too early, they take the place and
    the memory's time of programs that still work."""
    if EARLY:
        gdc_launch_dependents()
