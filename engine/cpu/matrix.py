"""Weights packed for the compiled kernels: one copy, for any number of rows.

A checkpoint's weights are stored in 16 bits where that loses nothing: decode reads all of them at each step, so fewer
bytes take less time. Arithmetic is float32 all the same. If the model is held in bfloat16 (`rounds`), many rows are
rounded to bfloat16 where the CPU multiplies that faster.

What is stored in fp8, fp4 or integers of 4 or 8 bits stays so. Its weights become floats in registers, by the product
and the order of sums that a matrix would have which was multiplied out in float32: results are the same, bit for bit.
With many rows a thread does this for a few outputs at a time, in its cache.

Legend: N rows of input, I input features, O output features, B blocks of inputs that share a scale.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter
from collections.abc import Mapping
from ctypes import byref

import torch
from torch import Tensor

from engine.cpu.library import BFLOAT16, FLOAT4, FLOAT8, FLOAT16, FLOAT32, INT4, INT8, MatrixC, Workers
from engine.models.clamped_swiglu import ClampedSwiglu
from engine.models.quantized_matrix import Kind, QuantizedMatrix

ALIGNMENT = 64
HUGE_PAGE = 2**21
BLOCK = 2**26
"""Bytes of a mapping for several matrices."""

STORE, GATED = 0, 2
"""What to do with a product, as in product.h."""

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
KINDS: Mapping[Kind, int] = {"fp8": FLOAT8, "fp4": FLOAT4, "int8": INT8, "int4": INT4}


class PackedMatrix:
    """A Linear in float32. With `paired` the first half of the outputs is a gate: the result is silu(gate) * the second
    half, O / 2 wide, or with `clamped` what that makes of them."""

    def __init__(
        self,
        weight_OI: Tensor | QuantizedMatrix,
        bias_O: Tensor | None,
        workers: Workers,
        memory: WeightMemory,
        *,
        rounds: bool,
        paired: bool = False,
        clamped: ClampedSwiglu | None = None,
    ) -> None:
        kept = weight_OI if isinstance(weight_OI, QuantizedMatrix) else None
        values_OI = narrowed(weight_OI) if isinstance(weight_OI, Tensor) else weight_OI.values_OI
        outputs, inputs = len(values_OI), values_OI.shape[1] if kept is None else kept.inputs
        self._workers = workers
        self._c = workers.kernels.c
        self._outputs = outputs // 2 if paired else outputs
        self._inputs = inputs
        self._how = GATED if paired else STORE
        stored_as = FORMATS[values_OI.dtype] if kept is None else KINDS[kept.kind]
        group = 0 if kept is None else kept.group
        alpha, limit = (0.0, 0.0) if clamped is None else (clamped.alpha, clamped.limit)
        self.matrix = MatrixC(None, None, stored_as, outputs, inputs, paired, rounds, group, alpha, limit)
        self.width = int(self._c.kedge_product_width(byref(self.matrix)))
        """Floats of a row of results, padding included."""
        self._packed = memory.take(self._c.kedge_packed_bytes(byref(self.matrix)))
        if kept is None:
            values_OI = values_OI.contiguous()
            self._c.kedge_pack(byref(self.matrix), values_OI.data_ptr(), self._packed.data_ptr())
        else:
            self._pack_quantized(kept)
        self.matrix.packed = self._packed.data_ptr()
        self._bias = None if bias_O is None else self._pack_bias(bias_O)

    def __call__(self, x_NI: Tensor) -> Tensor:
        assert x_NI.dtype == torch.float32
        x_NI = x_NI.contiguous()
        rows = x_NI.shape[0]
        y_NO = torch.empty(rows, self.width)
        scratch = aligned_bytes(self._c.kedge_product_scratch(byref(self.matrix), rows, self._workers.team))
        self._c.kedge_product(
            self._workers.team, byref(self.matrix), rows, x_NI.data_ptr(), self._inputs, y_NO.data_ptr(), self.width,
            self._how, scratch.data_ptr(),
        )  # fmt: skip
        return y_NO if self.width == self._outputs else y_NO[:, : self._outputs].contiguous()

    def _pack_quantized(self, kept: QuantizedMatrix) -> None:
        values_OI, scales_OB = kept.values_OI.view(torch.uint8).contiguous(), kept.scales_OB.contiguous()
        zeros_OB = torch.zeros_like(scales_OB, dtype=torch.uint8)
        if kept.zeros_OB is not None:
            zeros_OB = kept.zeros_OB.contiguous()
        assert scales_OB.shape[1] == -(-self._inputs // self.matrix.group)
        self._c.kedge_pack_quantized(
            byref(self.matrix), values_OI.data_ptr(), scales_OB.data_ptr(), zeros_OB.data_ptr(),
            self._packed.data_ptr(),
        )  # fmt: skip

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
        self._kept: Counter[Kind] = Counter()

    def __call__(
        self,
        weight_OI: Tensor | QuantizedMatrix,
        bias_O: Tensor | None,
        *,
        paired: bool = False,
        clamped: ClampedSwiglu | None = None,
    ) -> PackedMatrix:
        """For `paired` and `clamped` see PackedMatrix."""
        if isinstance(weight_OI, QuantizedMatrix):
            self._kept[weight_OI.kind] += 1
        return PackedMatrix(
            weight_OI, bias_O, self.workers, self._memory, rounds=self._rounds, paired=paired, clamped=clamped
        )

    def keeps(self, matrix: QuantizedMatrix) -> bool:
        """The kernels take two inputs at a time, do not know the NaN of fp8, and have the scales of fp4 by their
        exponents."""
        if matrix.inputs % 2 or matrix.group % 2:
            return False
        if matrix.kind == "fp4":
            smallest, largest = matrix.scales_OB.aminmax()
            return bool(smallest >= torch.finfo(torch.float32).tiny and largest.isfinite())
        return not (matrix.kind == "fp8" and bool(matrix.values_OI.isnan().any()))

    def gated(self, gate_up_OI: Tensor | QuantizedMatrix, bias_O: Tensor | None) -> PackedMatrix:
        return self(gate_up_OI, bias_O, paired=True)

    def clamped(
        self, gate_up_OI: Tensor | QuantizedMatrix, bias_O: Tensor, activation: ClampedSwiglu
    ) -> PackedMatrix:
        return self(gate_up_OI, bias_O, paired=True, clamped=activation)

    def describe(self) -> Mapping[str, str]:
        about = {"linear": "cpu", "linear_reason": f"compiled for {self.workers.kernels.variant}"}
        if self._kept:
            about["quantized"] = ", ".join(
                f"{count} matrices of {kind}" for kind, count in self._kept.items()
            )
        return about


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
