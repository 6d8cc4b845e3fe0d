"""The builds of the compiled kernels that run on this machine. Tests cover all of them. At every change, they cover the
one that the engine would choose."""

from __future__ import annotations

import os
import shutil

import pytest

from engine.cpu.library import VARIANTS, Kernels, NoKernels, find_kernels

FOUND = {variant: find_kernels(variants=(variant,)) for variant in VARIANTS}
CHOSEN = find_kernels()
RUNNING = sorted(
    (found.variant for found in FOUND.values() if isinstance(found, Kernels)),
    key=lambda variant: isinstance(CHOSEN, Kernels) and variant != CHOSEN.variant,
)
"""The first is the one that the engine chooses."""

every_build = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[pytest.mark.slow] * (number > 0))
        for number, variant in enumerate(RUNNING or ["none"])
    ],
)


def every_build_and(*threads: int) -> pytest.MarkDecorator:
    """Parametrizes `variant` and `threads`: the build that the engine chooses has each number of threads, the others
    have the last. All builds share work out by the same code."""
    return pytest.mark.parametrize(
        ("variant", "threads"),
        [
            pytest.param(variant, count, marks=[pytest.mark.slow] * (number > 0))
            for number, variant in enumerate(RUNNING or ["none"])
            for count in (threads if number == 0 else threads[-1:])
        ],
    )


def kernels_of(variant: str) -> Kernels:
    found = FOUND.get(variant, NoKernels("none of the builds"))
    if isinstance(found, NoKernels):
        if os.environ.get("KEDGE_TEST_DEVICE") == "cuda":
            pytest.skip("the tests are run for a card: nobody compiled the kernels for the CPU")
        if shutil.which("cc") is not None:
            pytest.fail(f"there is a compiler, and no kernels run here: {found.reason}")
        pytest.skip("the kernels were not compiled: there is no C compiler")
    return found
