"""Measures what a call costs by counting, not by time. The figure is the same on every machine, however busy."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def bytecodes(call: Callable[[], object]) -> int:
    """How many Python instructions `call` runs. Work inside C counts as one, however much it is: see `peak_bytes` for
    that."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = (
        True  # Python 3.12 reports opcodes only if a frame asked before the trace began
    )
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory allocated by `call` that exists at one time. It includes temporary arrays."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
