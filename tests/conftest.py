"""For every test: without a GPU kernels run in Triton's interpreter; torch computes on one thread; programs that tests
start can be interrupted."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_configure() -> None:
    """Models this small are slower on many threads, and sums keep one order. A shell starts background jobs with SIGINT
    ignored, and children would inherit that."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
