"""Fixtures for kernel tests, which run on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.engine.kernels.ahead_of_time import Compiler

AT_EVERY_CHANGE = {"test_kv_write.py", "test_rms_norm.py", "test_rotary.py", "test_silu_mul.py"}
"""Files that run at every change. The others take minutes in the interpreter: who changes a kernel names them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in AT_EVERY_CHANGE:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fills memory that nobody has written with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """One compiler for all tests: its process imports torch, which takes longer than compiling most kernels."""
    with Compiler() as compiler:
        yield compiler
