"""The card and its limits: how fast this card copies, reads and multiplies, all of it measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from benchmarks.gpu.stage import Stage, environment, time_device

GIB = 1024**3
MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second, with a copy's bytes read and written both counted; operations per second."""

    copy: float
    bf16: float


def run_environment(stage: Stage) -> None:
    found = environment(stage.device)
    name = found["card"] or found["machine"]["processor"]
    versions = f"torch {found['torch']}, triton {found['triton']}, transformers {found['transformers']}"
    note = f"{name}; Python {found['python']}, {versions}"
    memory = found.get("memory_bytes")
    stage.row("memory", memory and memory / GIB, "GiB", note=note, details=found)
    if found.get("state"):
        stage.row(f"{found['multiprocessors']} multiprocessors", note=found["state"].splitlines()[-1])


def run_ceilings(stage: Stage) -> None:
    copied = copy_bandwidth(stage)
    stage.row("copy, bytes read + written", copied / 1e9, "GB/s", details={"bytes_per_s": copied})
    read = read_bandwidth(stage)
    stage.row("read only (sum of float32)", read / 1e9, "GB/s", details={"bytes_per_s": read})
    for name, dtype in (("bf16", torch.bfloat16), ("float32, no tf32", torch.float32)):
        rate = matrix_rate(stage, dtype)
        stage.row(
            f"{name} product, {_side(stage)} cubed", rate / 1e12, "TFLOP/s", details={"flop_per_s": rate}
        )


def measure_ceilings(stage: Stage) -> Ceilings:
    """The limits that a section compares with. Each section measures them itself, on its card and at its time."""
    ceilings = Ceilings(copy_bandwidth(stage), matrix_rate(stage, torch.bfloat16))
    print(f"[{stage.section}] ceilings {asdict(ceilings)}", flush=True)
    return ceilings


def copy_bandwidth(stage: Stage) -> float:
    """Uses buffers far larger than the L2 cache, with random contents. The faster of torch's copy and of a kernel that
    copies: a copy that is a node of a CUDA graph reached less than two thirds of the kernel's rate on an H200."""
    size = 2 * GIB // 4 if not stage.dry else 2**18
    source = torch.randn(size, device=stage.device, generator=stage.generator(1))
    target = torch.empty_like(source)
    ways = (lambda _: target.copy_(source), lambda _: torch.neg(source, out=target))
    return 2 * source.nbytes / min(time_device(stage, way, 2).median_s for way in ways)


def read_bandwidth(stage: Stage) -> float:
    size = 2 * GIB // 4 if not stage.dry else 2**18
    source = torch.randn(size, device=stage.device, generator=stage.generator(2))
    return source.nbytes / time_device(stage, lambda _: source.sum(), 2).median_s


def matrix_rate(stage: Stage, dtype: torch.dtype) -> float:
    """Uses random data, since a product of zeros can run faster."""
    assert not torch.backends.cuda.matmul.allow_tf32
    side, generator = _side(stage), stage.generator(3)
    left, right = (
        torch.randn(side, side, device=stage.device, generator=generator).to(dtype) for _ in range(2)
    )
    product = torch.empty_like(left)
    return 2 * side**3 / time_device(stage, lambda _: torch.mm(left, right, out=product), 2, 7).median_s


def _side(stage: Stage) -> int:
    return 64 if stage.dry else MATRIX
