"""For every test: without a GPU kernels run in Triton's interpreter; programs that tests start can be interrupted."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
