"""Weights packed for the compiled kernels: one copy, for any number of rows.

A checkpoint's weights are stored in 16 bits where that loses nothing: decode reads all of them at each step, so fewer
bytes take less time. Arithmetic is float32 all the same. If the model is held in bfloat16 (`rounds`), many rows are
rounded to bfloat16 where the CPU multiplies that faster.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from ctypes import byref

import torch
from torch import Tensor

from engine.cpu.library import BFLOAT16, FLOAT16, FLOAT32, MatrixC, Workers
from engine.models.linear import Linear

ALIGNMENT = 64
HUGE_PAGE = 2**21
BLOCK = 2**26
"""Bytes of a mapping for several matrices."""

STORE, SILU_MUL = 0, 2
"""What to do with a product, as in product.h."""

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class PackedMatrix:
    """A Linear in float32. With `paired` the first half of the outputs is a gate: the result is silu(gate) * the second
    half, O / 2 wide."""

    def __init__(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        workers: Workers,
        memory: WeightMemory,
        *,
        rounds: bool,
        paired: bool = False,
    ) -> None:
        weight_OI = narrowed(weight_OI).contiguous()
        outputs, inputs = weight_OI.shape
        self._workers = workers
        self._c = workers.kernels.c
        self._outputs = outputs // 2 if paired else outputs
        self._inputs = inputs
        self._how = SILU_MUL if paired else STORE
        self.matrix = MatrixC(None, None, FORMATS[weight_OI.dtype], outputs, inputs, paired, rounds)
        self.width = int(self._c.kedge_product_width(byref(self.matrix)))
        """Floats of a row of results, padding included."""
        self._packed = memory.take(self._c.kedge_packed_bytes(byref(self.matrix)))
        self._c.kedge_pack(byref(self.matrix), weight_OI.data_ptr(), self._packed.data_ptr())
        self.matrix.packed = self._packed.data_ptr()
        self._bias = None if bias_O is None else self._pack_bias(bias_O)

    def __call__(self, x_NI: Tensor) -> Tensor:
        assert x_NI.dtype == torch.float32
        x_NI = x_NI.contiguous()
        rows = x_NI.shape[0]
        y_NO = torch.empty(rows, self.width)
        scratch = aligned_bytes(self._c.kedge_product_scratch(byref(self.matrix), rows))
        self._c.kedge_product(
            self._workers.team, byref(self.matrix), rows, x_NI.data_ptr(), self._inputs, y_NO.data_ptr(), self.width,
            self._how, scratch.data_ptr(),
        )  # fmt: skip
        return y_NO if self.width == self._outputs else y_NO[:, : self._outputs].contiguous()

    def _pack_bias(self, bias_O: Tensor) -> Tensor:
        packed = torch.empty(2 * self.width if self.matrix.paired else self.width)
        wide_O = bias_O.float().contiguous()
        self._c.kedge_pack_bias(byref(self.matrix), wide_O.data_ptr(), packed.data_ptr())
        self.matrix.bias = packed.data_ptr()
        return packed


class PackedLinears:
    """A Linears whose matrices are packed for the compiled kernels. For `rounds` see the module."""

    def __init__(self, workers: Workers, *, rounds: bool) -> None:
        self.workers = workers
        self._memory = WeightMemory()
        self._rounds = rounds

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return PackedMatrix(weight_OI, bias_O, self.workers, self._memory, rounds=self._rounds)

    def gated(self, gate_up_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return PackedMatrix(gate_up_OI, bias_O, self.workers, self._memory, rounds=self._rounds, paired=True)

    def describe(self) -> Mapping[str, str]:
        return {"linear": "cpu", "linear_reason": f"compiled for {self.workers.kernels.variant}"}


def narrowed(weight_OI: Tensor) -> Tensor:
    """The weights in 16 bits if that loses nothing."""
    if weight_OI.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow_OI = weight_OI.to(dtype)
            if torch.equal(narrow_OI.float(), weight_OI):
                return narrow_OI
    return weight_OI


def aligned_bytes(count: int) -> Tensor:
    """Uninitialised memory that begins at a cache line."""
    room = torch.empty(count + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + count]


class WeightMemory:
    """Memory for matrices, in few mappings: a process may have only so many (`vm.max_map_count`), and experts are ten
    thousands of matrices."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> Tensor:
        """Zeroed bytes from the start of a cache line."""
        count += -count % ALIGNMENT
        if count > len(self._free):
            self._free = huge_pages(max(count, BLOCK))
        taken, self._free = self._free[:count], self._free[count:]
        return taken


def huge_pages(count: int) -> Tensor:
    """Zeroed memory, in huge pages where the system has them: a step reads all weights, and address translation is then
    faster. No memory is used before it is written."""
    room = mmap.mmap(-1, count + HUGE_PAGE)
    memory = torch.frombuffer(room, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        room.madvise(mmap.MADV_HUGEPAGE, start, count // HUGE_PAGE * HUGE_PAGE)
    return memory[start : start + count]
