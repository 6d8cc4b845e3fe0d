"""Compiles Triton kernels for GPUs that this machine need not have, and reports the resources that they take.

A process that runs kernels in the interpreter cannot compile them, so another process does it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

MOST_SPILLED = 16
"""Bytes. No kernel should spill. Under Triton 3.6 none does; Triton 3.7 spills two registers of a few variants to the
stack. A loop's operands would be hundreds of bytes."""

SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""How many bytes of shared memory one block may have, by compute capability."""

BUILD_TIMEOUT_S = 240.0

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Build:
    """One kernel to compile for one card.

    `kernel` is "module:function". `signature` gives the type of every argument that is not in `constants`, as Triton
    writes it ("*bf16", "i32", "fp32"). A constant "tl.bfloat16" stands for that dtype. `divisible` names the pointers
    and integers that are multiples of 16, which the launcher would find by itself. `capability` is 80 for sm_80.
    """

    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    capability: int
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    texts: bool = False
    """Whether the report includes PTX and SASS."""


@dataclass(frozen=True)
class Report:
    """What a compiled kernel takes. `spilled_bytes` is the stack of a thread: kernels use the stack for spills only."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str = field(default="", repr=False)
    sass: str = field(default="", repr=False)

    def fits(self, capability: int) -> bool:
        return self.shared_bytes <= SHARED_LIMITS[capability]


class BuildFailed(RuntimeError):
    """The compiler refused a kernel. Holds the compiler's message."""


class Compiler:
    """Owns the process that compiles. The process starts with the first build."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=_leave_the_interpreter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.shutdown(cancel_futures=True)

    def build(self, builds: Sequence[Build]) -> list[Report]:
        """Compiles `builds` and returns their reports in the same order. Raises BuildFailed or TimeoutError."""
        return list(self._process.map(_compile, builds, timeout=BUILD_TIMEOUT_S))

    def aligned_parameters(self, kernel: str) -> set[str]:
        """The parameters of `kernel`, "module:function", whose divisibility makes another variant."""
        return self._process.submit(_aligned_parameters, kernel).result(BUILD_TIMEOUT_S)


def _leave_the_interpreter() -> None:
    """Turns the interpreter off in this process. Triton reads the variable when a kernel is defined."""
    os.environ.pop("TRITON_INTERPRET", None)


def _function(kernel: str) -> Any:
    module, _, name = kernel.partition(":")
    return getattr(importlib.import_module(module), name)


def _aligned_parameters(kernel: str) -> set[str]:
    return {each.name for each in _function(kernel).params if not each.do_not_specialize_on_alignment}


def _compile(one: Build) -> Report:
    try:
        return _compiled(one)
    except BuildFailed:
        raise
    except Exception as error:  # the compiler's own exceptions may not pickle
        raise BuildFailed(f"{one}: {error}") from None


def _compiled(one: Build) -> Report:
    import triton
    from triton import language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _function(one.kernel)
    constants: dict[str, Any] = {
        key: getattr(language, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value
        for key, value in one.constants.items()
    }
    missing = [arg for arg in kernel.arg_names if arg not in one.signature and arg not in constants]
    unknown = [arg for arg in (*one.signature, *constants) if arg not in kernel.arg_names]
    if missing or unknown:
        raise BuildFailed(f"{one.kernel}: missing arguments {missing}, unknown arguments {unknown}")
    signature = {arg: one.signature.get(arg, "constexpr") for arg in kernel.arg_names}
    attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in one.divisible}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", one.capability, 32),
        options={"num_warps": one.num_warps, "num_stages": one.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", file.name) if one.texts else ""
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    ptx = compiled.asm["ptx"] if one.texts else ""
    return Report(int(registers), int(stack), int(compiled.metadata.shared), ptx, sass)


def _tool(name: str, *arguments: str) -> str:
    from triton import knobs

    path = getattr(knobs.nvidia, name).path
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
